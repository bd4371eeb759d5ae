"""Order micro-batches in time: one begins when the one before it on the same device has been accumulated.

    before   micro_0/x ──► ... ──► micro_0/dw ──┐          micro_1/x ──► ... ──► micro_1/dw     both at once
    after    micro_0/x ──► ... ──► micro_0/dw ──┴─► gate ─^─► micro_1/x ──► ...                 one after the other

Where all micro-batches meet in the middle of a step (statistics of the whole batch, a loop that they share), those
after it cannot begin before: there is one order on each side. The edges are found once, on the folded graph. A gate is
a placeholder with a default: whoever fetches a prediction alone feeds it, and is spared the gradients before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.roles import is_update
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.frames import Frame, frames_of, unconditional
from autograph_rewrite.ir.graph import Graph, Node, Select, Span
from autograph_rewrite.ir.opdefs import find_op
from autograph_rewrite.ir.walk import BACK_EDGES, EXITS, ancestors, descendants, topological_order

GATE = "autograph_micro/gate"
FREE = frozenset(("Const", *EXITS))
"""What costs nothing, or belongs to a loop as far as waiting goes."""


class Wait(NamedTuple):
    """A node, and the micro-batch whose instance of it has to run first."""

    node: Node
    micro: int


class Gate(NamedTuple):
    """What waits for some nodes of a micro-batch, what passes that on, and the sums that have to have grown by then."""

    gate: Node
    passed: Node
    sums: tuple[Node, ...]


@dataclass(frozen=True)
class Order:
    """What expansion has to add to the instances.

    Attributes:
        roots: nodes that wait for something, with what the instance of each micro-batch waits for.
        sums: by gate, the sums over all micro-batches for whose partial result it waits.
        meetings: the first nodes of which none can run before all micro-batches have come so far.
    """

    roots: Mapping[Node, tuple[Wait | None, ...]] = field(default_factory=dict)
    sums: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    meetings: tuple[Node, ...] = ()


NO_ORDER = Order()


def order_micro(graph: Graph, micro: int) -> Order:
    """Add the gates to a complete folded graph; return what waits for them.

    Args:
        graph: the folded graph.
        micro: how many micro-batches each replica has.
    """
    if micro == 1:
        return NO_ORDER
    order = topological_order(graph)
    frames, certain = frames_of(order), unconditional(order)
    free_waiting(order, certain)
    early = counted_before(order)
    levels = levels_of(order, frames, early)
    members: dict[int, list[Node]] = {}
    for node in order:
        if node.span is Span.EACH and node.op not in FREE and node not in frames and node not in early:
            members.setdefault(levels[node], []).append(node)
    roots: dict[Node, tuple[Wait | None, ...]] = {}
    sums: dict[Node, tuple[Node, ...]] = {}
    for nodes in members.values():
        inside = set(nodes)
        made = gate(graph, nodes, certain)
        sums[made.gate] = made.sums
        waits = (None, *(Wait(made.passed, m) for m in range(micro - 1)))
        roots |= {node: waits for node in nodes if not any(producer in inside for producer in before(node))}
    meetings = tuple(nodes[0] for level, nodes in sorted(members.items()) if level)
    return Order(roots, sums, meetings)


def free_waiting(order: Iterable[Node], certain: Collection[Node]) -> None:
    """Let nothing wait for all micro-batches that need not.

    TensorFlow's gradients let some values wait for others that they do not read. What a function returns waits for its
    updates: then let whoever joins the micro-batches' parts of it wait instead. What follows from an effect, as the end
    of a branch from the updates in it, is waited for as before.
    """
    nodes = list(order)
    acted = descendants(node for node in nodes if _acts(node))
    for node in nodes:
        if node not in certain:
            continue
        if node.span is Span.ONCE and _is_pure(node) and (node.op != "NoOp" or node.control_users):
            for control in [one for one in node.controls if one in certain]:
                if _is_pure(control) and control.op != "NoOp" and control not in acted:
                    node.remove_control(control)
        elif node.op == "Identity" and node.span is Span.EACH:
            _wait_later(node)


def _is_pure(node: Node) -> bool:
    """Return whether a node does nothing but make its values."""
    op = find_op(node.op)
    return op is not None and not op.is_stateful


def _acts(node: Node) -> bool:
    """Return whether a node writes a variable, or runs for its effect alone."""
    return is_update(node) or not (_is_pure(node) or node.read_outputs)


def _wait_later(node: Node) -> None:
    """Let those that read a value wait for what it waits for itself, if all of them run once."""
    readers = [use.node for use in node.output().uses]
    if readers and all(reader.span is Span.ONCE for reader in (*readers, *node.control_users)):
        for control in [control for control in node.controls if control.span is Span.ONCE]:
            node.remove_control(control)
            for reader in readers:
                reader.add_control(control)


def gate(graph: Graph, nodes: Iterable[Node], certain: Collection[Node]) -> Gate:
    """Add the gate behind some nodes, and what passes it on.

    Args:
        graph: the folded graph.
        nodes: those that run for one micro-batch.
        certain: the nodes that run in any case: what is in a branch not taken would never open the gate.
    """
    inside = set(nodes)
    last = [node for node in inside if node in certain and not any(user in inside for user in after(node))]
    last.sort(key=lambda node: node.name)
    running = {node: [user for user in after(node) if is_running_sum(user)] for node in last}
    attrs = {"value": np.float32(0), "dtype": dtypes.FLOAT}
    default = graph.add("Const", name=f"{GATE}/default", attrs=attrs).output()
    attrs = {"dtype": dtypes.FLOAT, "shape": ()}
    controls = [node for node in last if not running[node]]
    made = graph.add("PlaceholderWithDefault", [default], name=GATE, attrs=attrs, span=Span.EACH, controls=controls)
    # Feeding cuts off what a value depends on, but not those that wait for the node: they wait for a reader.
    # TensorFlow makes a NoOp of most readers without readers of their own, and then lets all wait for the node.
    attrs = {"message": "gate"}
    passed = graph.add("CheckNumerics", [made.output()], name=f"{GATE}/passed", attrs=attrs, span=Span.EACH)
    return Gate(made, passed, tuple(dict.fromkeys(total for totals in running.values() for total in totals)))


def is_running_sum(node: Node) -> bool:
    """Return whether a node adds up all instances, so that expansion can add each as soon as it is there."""
    return node.op == "AddN" and node.span is Span.ONCE and node.selects == {0: Select.ALL} and len(node.inputs) == 1


def counted_before(order: Iterable[Node]) -> set[Node]:
    """Return what a value that all micro-batches make together needs, and that can be had without any variable.

    The number of examples that a mask keeps is such a value: all of it is known before the first micro-batch begins.
    """
    nodes = list(order)
    learnt = learnt_nodes(nodes)
    return ancestors(node for node in nodes if node not in learnt and Select.ALL in node.selects.values())


def learnt_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that depend on a variable."""
    touching = [node for node in nodes if any(value.dtype == dtypes.RESOURCE for value in node.inputs)]
    return descendants(touching, controls=False)


def before(node: Node) -> list[Node]:
    """Return what a node reads or waits for."""
    return [*[value.node for value in node.inputs], *node.controls]


def after(node: Node) -> list[Node]:
    """Return what reads a node or waits for it."""
    return [*[use.node for value in node.read_outputs for use in value.uses], *node.control_users]


def levels_of(order: list[Node], frames: Mapping[Node, Frame], early: Collection[Node]) -> dict[Node, int]:
    """Return how many times all instances have met before each node: in one that reads all of them, or in a loop."""
    levels: dict[Node, int] = dict.fromkeys(order, 0)
    loops: dict[str, int] = {}
    for _ in range(len({frame[0] for frame in frames.values()}) + 1):
        changed = False
        for node in order:
            if node in early:
                continue
            level = max([_reached(node, i, levels) for i in range(len(node.inputs))], default=0)
            level = max([level, *(_met(node, control, levels) for control in node.controls)])
            frame = frames.get(node)
            if frame is not None:
                if node.op in ("Enter", "RefEnter"):
                    loops[frame[0]] = max(loops.get(frame[0], 0), level + 1)
                level = max(level, loops.get(frame[0], 0))
            changed |= level != levels[node]
            levels[node] = level
        if not changed:
            break
    return levels


def _reached(node: Node, index: int, levels: Mapping[Node, int]) -> int:
    producer = node.inputs[index].node
    if producer.op in BACK_EDGES:
        return 0
    return levels[producer] + (node.selects.get(index) is Select.ALL)


def _met(node: Node, control: Node, levels: Mapping[Node, int]) -> int:
    return levels[control] + (node.span is Span.ONCE and control.span is Span.EACH)
