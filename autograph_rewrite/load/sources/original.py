"""Reject a graph that is distributed already: the result of a rewrite is not rewritten again.

Replicas of replicas would each hold members of the first rewrite's collectives, which then never meet.
"""

from __future__ import annotations

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import PASS_ATTR
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.training_graph import TrainingGraph

_COLLECTIVES = ("Collective", "Nccl", "XlaAllReduce")


def require_original(item: TrainingGraph, own_pass: str) -> None:
    """Make sure that an item is a single-device graph.

    Args:
        item: an item in normal form, so that functions are part of its graph.
        own_pass: what normalising calls itself in the provenance of nodes.

    Raises:
        GraphError: it was made by a rewrite, or by something else that puts collectives into graphs.
    """
    made = next((node for node in item.graph if _made_by(node) not in ("", own_pass)), None)
    if made is not None or item.report is not None or item.layout is not None:
        by = f": the pass '{_made_by(made)}' of an earlier rewrite made a node of it" if made is not None else ""
        raise GraphError(
            f"the graph is already distributed{by}",
            node=made,
            hint="rewrite the original graph; one rewrite takes everything (devices, strategy, microbatches, stages)",
        )
    for node in item.graph:
        if node.op.startswith(_COLLECTIVES):
            raise GraphError(
                "the graph is already distributed: it holds a collective, which waits for its other members",
                node=node,
                hint="build the graph for one device, outside of any tf.distribute strategy",
            )


def _made_by(node: Node) -> str:
    """Return the pass that made a node; empty for one of an original graph."""
    if PASS_ATTR not in node.attrs:
        return ""
    name: bytes = node.attr(PASS_ATTR)
    return name.decode(errors="replace")
