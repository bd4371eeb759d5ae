"""What a step really executes: gradients that somebody merely waits for are left out, as TensorFlow leaves them out."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.analysis.propagate import is_pinned
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.variable_ops import is_update
from autograph_rewrite.ops.traits import has


def executed(order: Iterable[Node], outputs: Iterable[Value]) -> list[Node]:
    """Return the nodes that serve an update, an effect or an output by data; its dependency optimizer drops others.

    Args:
        order: the nodes that are to run, producers first.
        outputs: what the outside reads.
    """
    nodes = list(order)
    effects = [node for node in nodes if is_update(node) or is_pinned(node)]
    kept = ancestors([*effects, *(value.node for value in outputs)], controls=False)
    return [node for node in nodes if node in kept or has(node.op, "orders")]
