"""Copies of a graph, made in flat loops: deep graphs are common, and recursion ends at a thousand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autograph_rewrite.ir.graph import Graph, Node


def clone_into(graph: Graph, target: Graph, prefix: str) -> dict[Node, Node]:
    """Copy every node into `target`, which may be `graph` itself, under `prefix`; return old -> new."""
    copies: dict[Node, Node] = {}
    for node in tuple(graph):
        copy = type(node)(target, prefix + node.name, node.op, node.device, node._attrs, node.rest)
        copy.span = node.span
        copies[node] = target.insert(copy)
    for node, copy in copies.items():
        copy.set_inputs([copies[v.node].output(v.index) for v in node._inputs], node.selects)
        for control in node._controls:
            copy.add_control(copies[control])
    return copies


def clone(graph: Graph) -> Graph:
    """Return an independent copy, with library, versions and anchors."""
    copy = type(graph)()
    copies = clone_into(graph, copy, "")
    copy.library, copy.versions, copy.rest = graph.library, graph.versions, graph.rest
    copy.anchors = {name: copies[v.node].output(v.index) for name, v in graph.anchors.items()}
    copy.edits = 0
    return copy
