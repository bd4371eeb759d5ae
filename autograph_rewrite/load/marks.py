"""Marks in a user's own layers: what is recomputed, and which replica one is; TensorFlow ignores them.

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
from autograph_rewrite.ir.types.replica_marks import COUNT, GATHER, ID, SCOPE, SUM, WEIGHT

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
    counted = re.fullmatch(r"(.+?)_\d+", name)
    return (name, counted[1]) if counted else (name,)


def has_segments(nodes: Iterable[tuple[str, Container[str]]]) -> bool:
    """Return whether some node is in a scope that is to be computed again, or marked as such.

    Args:
        nodes: name and attributes of each.
    """
    scope = re.compile(f"{AGAIN_SCOPE}/.+")
    return any((AGAIN in name and scope.fullmatch(name) is not None) or SEGMENT_ATTR in attrs for name, attrs in nodes)


# Replicas in a user's own function: which one runs it, how many there are, and what they hold together.
#
#     noise = x + 0.1 * tf.cast(ar.replica_id(), tf.float32)      each replica its own
#     total = ar.all_reduce(tf.reduce_max(noise), "mean")         one value again
#
# Where nothing is distributed there is one replica, 0. What depends on the id is by nature not what one device
# computes; the report of a rewrite lists it. TensorFlow has these as `ReplicaContext.replica_id_in_sync_group`,
# `num_replicas_in_sync`, `all_reduce` and `all_gather`.

OPERATIONS = ("sum", "mean")


def replica_id() -> Any:
    """Return the number of the replica that runs this, an int32 scalar: worker by worker, and 0 on one device.

    Micro-batches of a replica have its number.
    """
    return _asked(ID, 0)


def num_replicas() -> Any:
    """Return how many replicas run this, an int32 scalar: 1 on one device."""
    return _asked(COUNT, 1)


def _asked(what: str, on_one: int) -> Any:
    """Return a number whose value nothing but a run knows: TensorFlow would fold a constant into shapes."""
    import tensorflow as tf

    number = tf.constant(on_one, tf.int32)
    return tf.compat.v1.placeholder_with_default(number, [], name=f"{SCOPE}/{what}")


def all_reduce(value: Any, operation: str = "sum") -> Any:
    """Return the sum or the mean of what the replicas hold; of what is alike in all of them, that.

    What is computed from examples is that of the whole batch anyway: only a value that differs by `replica_id`, or by
    a `variable_policies` component, is added up.

    Args:
        value: of any numeric type; of a floating one for a mean.
        operation: "sum" or "mean"; also as a `tf.distribute.ReduceOp`.

    Raises:
        GraphError: there is no such operation, or no mean of such values.
    """
    import tensorflow as tf

    value = tf.convert_to_tensor(value)
    name = str(getattr(operation, "value", operation)).lower()
    if name not in OPERATIONS:
        raise GraphError(f"replicas are not reduced by '{operation}'", hint="choose sum or mean")
    if not (value.dtype.is_floating or value.dtype.is_complex or value.dtype.is_integer):
        raise GraphError(f"replicas cannot add up values of type {value.dtype.name}", hint="cast them to numbers")
    if name == "mean":
        if value.dtype.is_integer:
            raise GraphError(f"there is no mean of {value.dtype.name}", hint="cast it to a floating type, or use sum")
        value = value * tf.identity(tf.ones([], value.dtype), name=f"{SCOPE}/{WEIGHT}")
    return tf.identity(value, name=f"{SCOPE}/{SUM}")


def all_gather(value: Any, axis: int = 0) -> Any:
    """Return what the replicas hold, one behind the other in the order of their ids; on one device, the value.

    Args:
        value: of a known rank above 0, and of one shape on all replicas; numbers or booleans. Of examples there is
            nothing to gather: what is computed from them is that of the whole batch, and a rewrite refuses it.
        axis: along which they are joined; counted from the end where it is negative.

    Raises:
        GraphError: the value has no such axis, or none of these types.
    """
    import tensorflow as tf

    value = tf.convert_to_tensor(value)
    rank = value.shape.rank
    if not rank or not -rank <= axis < rank:
        raise GraphError(f"a value of shape {value.shape} has no axis {axis} to be joined along", hint="reshape it")
    if value.dtype == tf.bool:
        return tf.cast(all_gather(tf.cast(value, tf.int32), axis), tf.bool)
    axis %= rank
    mine = tf.equal(tf.range(num_replicas()), replica_id())
    mine = tf.reshape(mine, tf.concat([tf.shape(mine), tf.ones([rank], tf.int32)], 0))
    table = tf.identity(tf.where(mine, value[None], tf.zeros_like(value)[None]), name=f"{SCOPE}/{GATHER}")
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank + 1)]
    shape = tf.shape(value)
    return tf.reshape(tf.transpose(table, order), tf.concat([shape[:axis], [-1], shape[axis + 1 :]], 0))
