"""Devices of a pipeline: nodes on their stage; a variable, its slots and its update where it is first read.

EACH nodes   those that passes made: the stage of what they read, or else of what reads them
ONCE nodes   from the summed gradient to the update: the stage of the gradient, or that of the update if it has a part
             in what they read; what touches a variable: beside it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autograph_rewrite.analysis.barriers import predecessors
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, ONCE
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.traits import has
from autograph_rewrite.resolve.stages.assignment import Stages


def complete_stages(graph: Graph, stages: Stages) -> None:
    """Give a stage to the EACH nodes that passes have made since the original ones were assigned."""
    order = topological_order(graph)
    new = [node for node in order if node.span == EACH and node not in stages.of]
    for node in new:
        known = [producer for producer in predecessors(node) if producer in stages.of]
        late = [stages.of[producer] for producer in known if producer in stages.backward]
        if late:
            stages.backward.add(node)
            stages.of[node] = min(late)
        elif known and not _begins(node):
            stages.of[node] = max(stages.of[producer] for producer in known)
    for node in reversed(new):
        readers = [use.node for value in node.read_outputs for use in value.uses if use.node in stages.of]
        if node not in stages.of and readers:
            stages.of[node] = min(stages.of[reader] for reader in readers)
            if all(reader in stages.backward for reader in readers):
                stages.backward.add(node)
    for node in new:
        stages.of.setdefault(node, 0)


def _begins(node: Node) -> bool:
    """Return whether a node works on nothing that a stage has made: it is placed where it is read."""
    return all(value.node.span == ONCE or has(value.node.op, "constant") for value in node.inputs)


class Cells(NamedTuple):
    """The devices of a replica.

    Attributes:
        devices: of each of its stages, the logical devices.
        logical: which of them has a node; the first where it does not say.
    """

    devices: Sequence[Sequence[str]]
    logical: Mapping[Node, int] = {}

    def of(self, node: Node, stage: int) -> str:
        """Return the device of a node of a stage."""
        return self.devices[stage % len(self.devices)][self.logical.get(node, 0)]


def place_stages(graph: Graph, stages: Stages, cells: Cells, *, captured: bool, driver: str = "") -> None:
    """Set the device of every node that runs once.

    Args:
        graph: the folded graph.
        stages: of its EACH nodes.
        cells: the devices of the first replica.
        captured: variables live outside of the graph, on the first device.
        driver: where stages are in several processes, the CPU of the one that runs them.
    """
    order = topological_order(graph)
    handles = _stages_of_handles(order, stages)
    found: dict[Node, int] = {}
    choices: dict[Node, list[int]] = {}
    for node in order:
        if node.span == EACH:
            found[node] = stages.of.get(node, 0)
            continue
        touched = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
        producers = [found[value.node] for value in node.inputs if value.node.span == EACH or value.node in found]
        if touched or node in handles:
            found[node] = handles.get(touched[0] if touched else node, 0)
        elif producers:
            found[node], choices[node] = max(producers), producers
        if captured and (touched or _gives_handle(node)):
            found[node] = 0
    for node in reversed(order):
        if node.span == EACH:
            continue
        readers = [found[use.node] for value in node.read_outputs for use in value.uses if use.node in found]
        if node not in found:
            found[node] = min(readers, default=0)
        elif len(set(readers)) == 1 and readers[0] in choices.get(node, ()):
            found[node] = readers[0]  # a gradient that is scaled by the norm of all stays where it is
        is_drivers = driver and has(node.op, "of_the_program")
        node.set_device(driver if is_drivers else cells.of(node, found[node]))


def _gives_handle(node: Node) -> bool:
    return any(value.dtype == dtypes.RESOURCE for value in node.read_outputs) and not node.inputs


def _stages_of_handles(order: Sequence[Node], stages: Stages) -> dict[Node, int]:
    """Return the stage of each variable: the first that reads it; of slots, that of what they are kept for.

    Where that is not known, it is the stage of the gradient that updates them.
    """
    handles: dict[Node, int] = {}
    for node in order:
        if not any(value.dtype == dtypes.RESOURCE for value in node.inputs) or is_update(node):
            continue
        readers = {use.node for value in node.read_outputs for use in value.uses}
        own = {node} if node.span == EACH else set()
        read_in = [stages.of[reader] for reader in readers | own if reader in stages.of]
        for value in node.inputs:
            if value.dtype == dtypes.RESOURCE and read_in:
                handle = handle_node(value)
                handles[handle] = min(handles.get(handle, stages.count), *read_in)
    kept = {slot: handles[owner] for slot, owner in stages.owners.items() if owner in handles}
    handles = {**kept, **handles}
    reached: dict[Node, int] = {}
    for node in order:
        if node.span == EACH:
            continue
        predecessors = [stages.of[v.node] for v in node.inputs if v.node in stages.of]
        predecessors += [reached[v.node] for v in node.inputs if v.node in reached]
        if predecessors:
            reached[node] = max(predecessors)
        if not is_update(node):
            continue
        touched = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
        known = [handles[handle] for handle in touched if handle in handles]
        stage = known[0] if known else reached.get(node)
        if stage is not None:
            handles |= {handle: stage for handle in touched if handle not in handles}
    return handles
