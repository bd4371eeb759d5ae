"""Clone a graph, without recursion: graphs are deeper than Python's recursion limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autograph_rewrite.ir.graph import Graph, Node


def clone_into(graph: Graph, target: Graph, prefix: str) -> dict[Node, Node]:
    """Copy every node into `target`, which may be `graph` itself, under `prefix`; return old -> new.

    Args:
        graph: what is copied.
        target: where to.
        prefix: of the copies' names, with its separator.
    """
    copies: dict[Node, Node] = {}
    for node in tuple(graph):
        copy = type(node)(target, prefix + node.name, node.op, node.device, node._attrs, node.rest)
        copy.span = node.span
        if copy.name in target.nodes:
            target.insert(copy)  # raises
        target.nodes[copy.name] = copies[node] = copy
    for node, copy in copies.items():  # what set_inputs and add_control do, without their checks
        inputs = tuple([copies[v.node].output(v.index) for v in node._inputs])
        for index, value in enumerate(inputs):
            value._uses[copy, index] = None
        copy._inputs = inputs
        if node.selects:
            copy.selects = dict(node.selects)
        for control in node._controls:
            waited = copies[control]
            copy._controls[waited] = None
            waited._control_users[copy] = None
    target.edits += len(copies)
    return copies


def clone(graph: Graph) -> Graph:
    """Return an independent copy, with library, versions and anchors."""
    copy = type(graph)()
    copies = clone_into(graph, copy, "")
    copy.library, copy.versions, copy.rest = graph.library, graph.versions, graph.rest
    copy.anchors = {name: copies[v.node].output(v.index) for name, v in graph.anchors.items()}
    copy.edits = 0
    return copy
