"""Digests: where the runtime feeds what this process was given, and reads what all processes have sent.

autograph_batch/digest ──► one row with the size of the part ──► sum over the processes ──► autograph_batch/digests
"""

from __future__ import annotations

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.context import Context

_OWN, _ALL = "digest of this process", "digests of all processes"


def add_digests(context: Context, blocks: Blocks) -> None:
    """Keep both for the runtime, where there are several processes."""
    if context.processes == 1:
        return
    graph = context.graph
    graph.set_anchor(_OWN, blocks.digest)
    graph.set_anchor(_ALL, blocks.digests)


def digest_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of both, where there are several processes."""
    return [graph.anchors[name].node for name in (_OWN, _ALL) if name in graph.anchors]


def digest_names(graph: Graph) -> tuple[str, str] | None:
    """Return the names of both tensors, where there are several processes."""
    names = [f"{node.name}:0" for node in digest_nodes(graph)]
    return (names[0], names[1]) if names else None
