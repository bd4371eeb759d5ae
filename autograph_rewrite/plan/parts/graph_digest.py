"""The digest by which a plan recognises its graph."""

from __future__ import annotations

import hashlib

from autograph_rewrite.ir.graph import Graph


def graph_digest(graph: Graph) -> str:
    """A hash of the graph's wiring: names, ops and data inputs, independent of the order of nodes."""
    return graph.remembered("digest", lambda: _digest(graph))


def _digest(graph: Graph) -> str:
    lines = sorted(
        f"{node.name}={node.op}({','.join([value.name for value in node.inputs])})" for node in graph.nodes.values()
    )
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
