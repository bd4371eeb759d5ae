"""Prioritise sends between processes: a part computes and sends the values that cross stages before the rest.

    before   B@1 = dz2, dw2, dx ...  dw1 ─► F@1 ...        dx waits for dw2; it leaves when stage 1 has nothing to do
    after    B@1 = dz2, dx ─► sent, turn ─^─► dw2, dw1     it leaves at once, and stage 0 goes on meanwhile

    before   stage 0: F0 F1 ...                            stage 1 asks for what F0 makes, and is heard after F1
    after    stage 1: ready ─^─► stage 0: F0 F1 ...        it has asked by then

TensorFlow's executor runs cheap nodes, and one expensive node, in the thread that made them ready; the others join a
queue, last in, first out. A send counts as expensive. A thread that goes from one part of a pipeline to the next never
reaches its queue, which matters if there is one thread, as on one core. So all that follows a value that another
process reads waits for a `turn`, which also counts as expensive and joins the queue first. The same queue holds the
requests of other processes, so it must be empty before the first part begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autograph_rewrite.analysis.barriers import predecessors
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of, is_inside, loops_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, STAGE, Span
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.passes.base.instance_order import HappensAfter
from autograph_rewrite.resolve.stages.assignment import Stages

SCOPE = "autograph_stages"
_WORK = 8192
"""Numbers that a turn checks: about 10,000 cycles, as TensorFlow treats nodes of less than 8,000 as cheap."""

Devices = Sequence[Sequence[str]]
"""By replica, the devices of its stages; stages beyond the last device begin again with the first."""


def are_apart(one: int, other: int, devices: Devices) -> bool:
    """Return whether two stages, by their numbers, are in different processes."""
    return any(process_of(own[one % len(own)]) != process_of(own[other % len(own)]) for own in devices)


def send_first(
    graph: Graph,
    order: Sequence[Node],
    nodes: Sequence[Node],
    stages: Stages,
    devices: Devices,
    unconditional: Collection[Node],
) -> list[Node]:
    """Send values that other processes read before the rest of a part is computed; return the added nodes.

    Args:
        graph: the folded graph.
        order: its nodes, producers first.
        nodes: a part: the forward or backward nodes of one stage, producers first.
        stages: the added nodes become backward if the part is.
        devices: of each replica's stages.
        unconditional: the nodes that run in every step.
    """
    stage = nodes[0].at(STAGE)
    certain = [node for node in nodes if node in unconditional]
    crossing = [value for node in certain for value in node.read_outputs if _away(value, devices)]
    if not crossing:
        return []
    frames, loops = frames_of(order), loops_of(order)
    _wait_for_less(nodes, crossing, loops)
    inside = set(nodes)
    needed = _before_all({value.node for value in crossing}, inside, loops)
    rest = inside - needed
    begin = [node for node in nodes if node in rest and not is_inside(node, frames)]
    late = [node for node in begin if not any(producer in rest for producer in predecessors(node))]
    made = _look(graph, "made", 1, EACH, [value.node for value in crossing])[-1]
    turn = _look(graph, "turn", _WORK, EACH, [made])[-1]
    added = [made, turn]
    for value in crossing:
        build = Builder.at(value.node, "sent", span=EACH)
        sent = build.node("Identity", value, controls=[made], T=value.dtype)
        for use in list(value.uses):
            if _is_away(use.node, stage, devices):
                use.node.set_input(use.index, sent.output())
        added.append(sent)
    for node in late:
        node.add_control(turn)
    for node in added:
        node.put(STAGE, stage)
    if nodes[0] in stages.backward:
        stages.backward |= set(added)
    return added


def _look(graph: Graph, name: str, numbers: int, span: Span, controls: Iterable[Node]) -> list[Node]:
    """Add zeros, and last a node that checks them once others have run; TensorFlow removes anything simpler.

    Args:
        graph: the folded graph.
        numbers: how many zeros.
        span: of the node that checks.
    """
    build = Builder(graph, f"{SCOPE}/{name}")
    zeros = build.const(np.zeros(numbers), dtypes.FLOAT, "zeros")
    some = build.op("PlaceholderWithDefault", zeros, what="some", dtype=dtypes.FLOAT, shape=(numbers,))
    looking = replace(build, span=span).node("CheckNumerics", some, controls=dict.fromkeys(controls), message=name)
    return [zeros.node, some.node, looking]


def _away(value: Value, devices: Devices) -> bool:
    return any(_is_away(use.node, value.node.at(STAGE), devices) for use in value.uses)


def _is_away(reader: Node, stage: int, devices: Devices) -> bool:
    return reader.span == EACH and are_apart(stage, reader.at(STAGE, stage), devices)


def _wait_for_less(nodes: Sequence[Node], crossing: Sequence[Value], loops: Mapping[Node, str]) -> None:
    """Remove the control edges by which TensorFlow makes all gradients of an op ready at once."""
    for node in _before_all({value.node for value in crossing}, set(nodes), loops):
        for control in [one for one in node.controls if node.op == "Identity" and one.op == "NoOp"]:
            if all(waited.span == EACH and is_pure(waited.op) for waited in predecessors(control)):
                node.remove_control(control)


def _before_all(roots: Collection[Node], inside: Collection[Node], loops: Mapping[Node, str]) -> set[Node]:
    """Return the roots, and the nodes in `inside` that they need; of a loop, all nodes."""
    of_loops = grouped((loops[node], node) for node in inside if node in loops)
    found, pending = set(roots), list(roots)
    while pending:
        node = pending.pop()
        for needed in (*predecessors(node), *of_loops.pop(loops.get(node, ""), ())):
            if needed in inside and needed not in found:
                found.add(needed)
                pending.append(needed)
    return found


def tell_ready(
    graph: Graph, stages: Stages, roots: Mapping[Node, tuple[HappensAfter | None, ...]], devices: Devices
) -> None:
    """Let the forward part of a stage begin once the next stage's process has asked for its values.

    Args:
        graph: the folded graph, placed.
        stages: which nodes are backward.
        roots: the first nodes of the parts of stages.
        devices: of each replica's stages, one for every stage.
    """
    begins = grouped((node.at(STAGE), node) for node in roots if node not in stages.backward)
    for stage, nodes in sorted(begins.items()):
        if stage + 1 >= len(devices[0]) or not are_apart(stage, stage + 1, devices):
            continue
        ready = _round(graph, stage, devices)
        for node in nodes:
            node.add_control(ready)


def _round(graph: Graph, stage: int, devices: Devices) -> Node:
    """Add a round trip to the next stage: a process that answers has asked for everything else as well."""
    here = [own[stage % len(own)] for own in devices]
    there = [own[(stage + 1) % len(own)] for own in devices]
    last: list[Node] = []
    for name, places in (("called", here[:1]), ("answered", there), ("ready", here[:1])):
        last = [_at(graph, f"{name}_{stage}", place, last) for place in dict.fromkeys(places)]
    return last[0]


def _at(graph: Graph, name: str, device: str, controls: Iterable[Node]) -> Node:
    """Add a cheap node on a device that waits for others."""
    added = _look(graph, name, 1, ONCE, controls)
    for node in added:
        node.set_device(device)
    return added[-1]
