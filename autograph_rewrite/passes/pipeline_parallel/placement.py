"""Give nodes that passes have added a stage: that of their producers, or else of their readers."""

from __future__ import annotations

from autograph_rewrite.analysis.barriers import predecessors
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, ONCE, STAGE
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ops.traits import has
from autograph_rewrite.resolve.stages.assignment import Stages


def stage_of(node: Node) -> int | None:
    """Return the stage of a node that runs for each block; None if it has no stage yet, or runs once."""
    return node.at(STAGE) if node.span == EACH and STAGE in node.place else None


def complete_stages(graph: Graph, stages: Stages) -> None:
    """Give a stage to the EACH nodes that passes have added since stages were assigned."""
    order = topological_order(graph)
    new = [node for node in order if node.span == EACH and STAGE not in node.place]
    for node in new:
        known = {producer: stage for producer in predecessors(node) if (stage := stage_of(producer)) is not None}
        late = [stage for producer, stage in known.items() if producer in stages.backward]
        if late:
            stages.backward.add(node)
            node.put(STAGE, min(late))
        elif known and not _begins(node):
            node.put(STAGE, max(known.values()))
    for node in reversed(new):
        users = [use.node for value in node.read_outputs for use in value.uses]
        readers = {user: stage for user in users if (stage := stage_of(user)) is not None}
        if STAGE not in node.place and readers:
            node.put(STAGE, min(readers.values()))
            if stages.backward.issuperset(readers):
                stages.backward.add(node)
    for node in new:
        if STAGE not in node.place:
            node.put(STAGE, 0)


def _begins(node: Node) -> bool:
    """Return whether a node reads no value of a stage; it gets the stage of its readers."""
    return all(value.node.span == ONCE or has(value.node.op, "constant") for value in node.inputs)
