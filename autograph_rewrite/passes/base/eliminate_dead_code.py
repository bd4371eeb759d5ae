"""Remove the nodes that no output, target or initialiser needs."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors


def eliminate_dead_code(graph: Graph, roots: Iterable[Node]) -> int:
    """Remove every node that the roots do not depend on; return the number of removed nodes."""
    kept = ancestors(roots)
    dead = [node for node in graph if node not in kept]
    graph.erase_all(dead)
    return len(dead)
