"""Give a node the name of one that it replaces, so that outsiders who hold the name still find it."""

from __future__ import annotations

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node


def take_name(graph: Graph, node: Node, name: str) -> None:
    """Rename `node`.

    Raises:
        GraphError: another node has the name.
    """
    if name in graph.nodes:
        raise GraphError(f"the name '{name}' is taken", node=graph.nodes[name])
    del graph.nodes[node.name]
    node.name = name
    graph.nodes[name] = node
    graph.edits += 1
