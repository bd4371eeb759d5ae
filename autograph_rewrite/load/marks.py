"""Marks in a user's own layers: names and scopes that rematerialisation finds in the graph, and TensorFlow ignores.

    h = ar.checkpoint_name(h, "h")      an identity .../checkpoint_name/h: `remat: {policy: names, names: [h]}` keeps it
    block = ar.recompute_grad(block)    a scope .../recompute_grad/...: a segment, computed again for its gradients

Where nothing is distributed they are an identity and a name scope, and the numbers are those without them. JAX has
both, as `jax.ad_checkpoint.checkpoint_name` and `jax.checkpoint`. `tf.recompute_grad` differentiates again; these do
not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph

Function = TypeVar("Function", bound=Callable[..., Any])
NAMED = "checkpoint_name/"
"""The scope of what is named."""
AGAIN = "recompute_grad"
"""The scope of what is computed again."""
AGAIN_SCOPE = rf"(?:.*/)?{AGAIN}(?:_\d+)?"
"""What the names of these scopes look like."""
SEGMENT_ATTR = "_autograph_segment"
"""The attribute with the number of the segment in which `tf.recompute_grad` has computed a node again."""
CHECKPOINTS = "checkpoints"
"""The collection of what `remat: {policy: collection}` keeps."""
CHECKPOINT_ATTR = "_autograph_checkpoint"
"""The attribute of a node that was in it."""
_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-]*")
_USED_TWICE = re.compile(r"_\d+")


def checkpoint_name(x: Any, name: str) -> Any:
    """Return x, under a name by which `remat: {policy: names}` keeps it.

    Raises:
        GraphError: TensorFlow would take the name for no node's.
    """
    import tensorflow as tf

    if not _NAME.fullmatch(name):
        raise GraphError(f"'{name}' cannot name a tensor", hint="use letters, digits, '.', '-' and '_'")
    return tf.nest.map_structure(lambda part: tf.identity(part, name=NAMED + name), x)


def recompute_grad(f: Function) -> Function:
    """Return f, whose insides are computed again for their gradients where its graph is rewritten, instead of kept.

    A configuration with a `remat.policy` decides in its place; `remat: {policy: none}` keeps everything.
    """

    @functools.wraps(f)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        with tf.name_scope(AGAIN):
            return f(*args, **kwargs)

    return scoped  # type: ignore[return-value]


def mark_checkpoints(graph: Graph, names: Iterable[str]) -> None:
    """Mark the nodes that the collection of checkpoints lists; of names that the graph does not have, none."""
    for name in names:
        if name in graph.nodes:
            graph.nodes[name].set_attr(CHECKPOINT_ATTR, CHECKPOINTS)


def names_given(node: str) -> tuple[str, ...]:
    """Return the names that a node may have been given: TensorFlow counts those that are given twice."""
    scope, found, name = node.rpartition(NAMED)
    if not found or "/" in name or (scope and not scope.endswith("/")):
        return ()
    counted = re.fullmatch(rf"(.+?){_USED_TWICE.pattern}", name)
    return (name, counted[1]) if counted else (name,)


def has_segments(nodes: Iterable[tuple[str, Container[str]]]) -> bool:
    """Return whether some node is in a scope that is to be computed again, or marked as such.

    Args:
        nodes: name and attributes of each.
    """
    scope = re.compile(f"{AGAIN_SCOPE}/.+")
    return any((AGAIN in name and scope.fullmatch(name) is not None) or SEGMENT_ATTR in attrs for name, attrs in nodes)
