"""Define marks that users put into layers, for recomputation and for replicas; TensorFlow ignores them.

    h = ar.checkpoint_name(h, "h")      an identity .../checkpoint_name/h: `remat: {policy: names, names: [h]}` keeps it
    block = ar.recompute_grad(block)    a scope .../recompute_grad/...: a segment, recomputed for its gradients

On a single device they are only an identity and a name scope, which change no numbers. JAX has the same as
`jax.ad_checkpoint.checkpoint_name` and `jax.checkpoint`. Unlike `tf.recompute_grad`, they do not differentiate again.
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
"""The scope of named values."""
AGAIN = "recompute_grad"
"""The scope of recomputed ops."""
AGAIN_SCOPE = rf"(?:.*/)?{AGAIN}(?:_\d+)?"
"""Pattern of the names of these scopes."""
SEGMENT_ATTR = "_autograph_segment"
"""The attribute with the number of the segment in which `tf.recompute_grad` recomputed a node."""
CHECKPOINTS = "checkpoints"
"""The collection of nodes that `remat: {policy: collection}` keeps."""
CHECKPOINT_ATTR = "_autograph_checkpoint"
"""The attribute of a node in that collection."""
_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-]*")


def checkpoint_name(x: Any, name: str) -> Any:
    """Return x under a name, by which `remat: {policy: names}` keeps it.

    Raises:
        GraphError: TensorFlow does not allow the name for a node.
    """
    import tensorflow as tf

    if not _NAME.fullmatch(name):
        raise GraphError(f"'{name}' cannot name a tensor", hint="use letters, digits, '.', '-' and '_'")
    return tf.nest.map_structure(lambda part: tf.identity(part, name=NAMED + name), x)


def recompute_grad(f: Function) -> Function:
    """Return f as a segment: a rewritten graph recomputes its activations for the gradients instead of keeping them.

    A `remat.policy` in the configuration overrides this; `remat: {policy: none}` keeps everything.
    """

    @functools.wraps(f)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        with tf.name_scope(AGAIN):
            return f(*args, **kwargs)

    return scoped  # type: ignore[return-value]


def mark_checkpoints(graph: Graph, names: Iterable[str]) -> None:
    """Mark the nodes that the collection of checkpoints lists; ignore names that the graph does not have."""
    for name in names:
        if name in graph.nodes:
            graph.nodes[name].set_attr(CHECKPOINT_ATTR, CHECKPOINTS)


def names_given(node: str) -> tuple[str, ...]:
    """Return the possible arguments of `checkpoint_name` for a node: TensorFlow numbers repeated names."""
    scope, found, name = node.rpartition(NAMED)
    if not found or "/" in name or (scope and not scope.endswith("/")):
        return ()
    counted = re.fullmatch(r"(.+?)_\d+", name)
    return (name, counted[1]) if counted else (name,)


def has_segments(nodes: Iterable[tuple[str, Container[str]]]) -> bool:
    """Return whether any node is in a scope of `recompute_grad`, or has the attribute of a segment.

    Args:
        nodes: name and attributes of each.
    """
    scope = re.compile(f"{AGAIN_SCOPE}/.+")
    return any((AGAIN in name and scope.fullmatch(name) is not None) or SEGMENT_ATTR in attrs for name, attrs in nodes)


# Replicas in a user's function: the number of this replica, the number of all, and reductions over them.
#
#     noise = x + 0.1 * tf.cast(ar.replica_id(), tf.float32)      different on each replica
#     total = ar.all_reduce(tf.reduce_max(noise), "mean")         one value again
#
# A single device is replica 0 of one. Values that depend on the id differ from those of one device by design; the
# report of a rewrite lists them. TensorFlow's counterparts are `ReplicaContext.replica_id_in_sync_group`,
# `num_replicas_in_sync`, `all_reduce` and `all_gather`.

OPERATIONS = ("sum", "mean")


def replica_id() -> Any:
    """Return the number of this replica, an int32 scalar, counted worker by worker; 0 on one device.

    All micro-batches of a replica have its number.
    """
    return _asked(ID, 0)


def num_replicas() -> Any:
    """Return the number of replicas, an int32 scalar; 1 on one device."""
    return _asked(COUNT, 1)


def _asked(what: str, on_one: int) -> Any:
    """Return a number that is known only in a run, because TensorFlow would fold a constant into shapes."""
    import tensorflow as tf

    number = tf.constant(on_one, tf.int32)
    return tf.compat.v1.placeholder_with_default(number, [], name=f"{SCOPE}/{what}")


def all_reduce(value: Any, operation: str = "sum") -> Any:
    """Return the sum or mean over the replicas of a value that differs between them; return any other value unchanged.

    A value computed from examples is that of the whole batch already. Only a value that depends on `replica_id`, or on
    a component of a variable (`variable_policies`), differs between replicas.

    Args:
        value: of any numeric type; of a floating type for a mean.
        operation: "sum" or "mean"; also as a `tf.distribute.ReduceOp`.

    Raises:
        GraphError: the operation does not exist, or is not possible for this type.
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
    """Return the values of all replicas, concatenated in the order of their ids; on one device, the value.

    Args:
        value: of a known rank above 0, and of one shape on all replicas; numbers or booleans. A rewrite refuses a value
            that is computed from examples, which is that of the whole batch already.
        axis: the axis of concatenation; negative ones count from the end.

    Raises:
        GraphError: the value has no such axis.
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
