"""Read and assign full values of variables that a rewrite has mirrored or sharded.

w on 2 devices, each copy in 3 shards    (w/part_0 w/part_1 w/part_2), (replica_1/w/part_0 ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autograph_rewrite.requires import tensorflow
from autograph_rewrite.training_graph import Shards, TrainingGraph, Variable


def copies_of(item: TrainingGraph, variable: Variable) -> tuple[tuple[str, ...], ...]:
    """Return the nodes that give the handles of each copy of a variable: one each, or one per shard."""
    if variable.shards is not None and variable.shards.copies:
        return variable.shards.copies
    shards = variable.shards.handles if variable.shards is not None else (variable.handle,)
    found = [instances_of(item, handle) for handle in shards]
    return tuple(zip(*found, strict=True))


def instances_of(item: TrainingGraph, node: str) -> tuple[str, ...]:
    """Return the instances of an original node; the node itself in an original graph."""
    return (item.layout.instances(node) if item.layout is not None else ()) or (node,)


def is_apart(variable: Variable | None) -> bool:
    """Return whether other workers hold shards of a variable, which they write themselves."""
    return variable is not None and variable.shards is not None and bool(variable.shards.elsewhere)


class Copy:
    """Adds operations to a graph that read and write the full value of one copy of a variable.

    Args:
        handles: nodes that give the handle, or those of the shards in order.
    """

    def __init__(self, graph: Any, handles: Sequence[str], variable: Variable) -> None:
        self._tf = tensorflow()
        self._graph = graph
        self.handles = [graph.get_tensor_by_name(f"{handle}:0") for handle in handles]
        self._dtype = self._tf.as_dtype(variable.dtype)
        self._shards = variable.shards

    def read(self) -> Any:
        """Return a tensor with the value."""
        raw = self._tf.raw_ops
        parts = self._of_each(
            lambda handle: raw.ReadVariableOp(resource=handle, dtype=self._dtype), lambda ref: raw.Identity(input=ref)
        )
        if self._shards is None:
            return parts[0]
        with self._graph.device(self.handles[0].device):
            return join(self._shards, parts)

    def write(self, value: Any) -> Any:
        """Return an op that assigns a value to the variable, except for the shards that other workers write."""
        raw, writes = self._tf.raw_ops, []
        others = self._shards.elsewhere if self._shards is not None else ()
        parts = [value]
        if self._shards is not None:
            with self._graph.device(self.handles[0].device):
                parts = cut(self._shards, value)
        for number, (handle, part) in enumerate(zip(self.handles, parts, strict=True)):
            if number in others:
                continue
            with self._graph.device(handle.device):
                if handle.dtype != self._tf.resource:
                    writes.append(raw.Assign(ref=handle, value=part, validate_shape=False).op)
                else:
                    writes.append(raw.AssignVariableOp(resource=handle, value=part))
        return writes[0] if len(writes) == 1 else self._tf.group(writes)

    def is_initialized(self) -> Any:
        """Return a tensor that says whether the variable, with all its shards, has a value."""
        raw = self._tf.raw_ops
        found = self._of_each(
            lambda handle: raw.VarIsInitializedOp(resource=handle), lambda ref: raw.IsVariableInitialized(ref=ref)
        )
        return found[0] if len(found) == 1 else self._tf.reduce_all(self._tf.stack(found))

    def _of_each(self, of_resource: Callable[[Any], Any], of_reference: Callable[[Any], Any]) -> list[Any]:
        """Return what an op gives for each handle, on its device; a legacy variable has a reference."""
        found = []
        for handle in self.handles:
            with self._graph.device(handle.device):
                found.append((of_resource if handle.dtype == self._tf.resource else of_reference)(handle))
        return found


# Cut the value of a variable into its shards, and join them, with TensorFlow's ops.


def cut(shards: Shards, value: Any) -> list[Any]:
    """Return the shards of a tensor."""
    tf = tensorflow()

    def split(part: Any, sizes: tuple[int, ...], axis: int) -> Any:
        counts = tf.constant(sizes, tf.int64)
        return tf.raw_ops.SplitV(value=part, size_splits=counts, axis=axis, num_split=len(sizes))

    return shards.cut(value, split)


def join(shards: Shards, pieces: Sequence[Any]) -> Any:
    """Return the full value of its shards, which are in the order of the handles."""
    tf = tensorflow()
    return shards.join(pieces, lambda parts, axis: tf.raw_ops.ConcatV2(values=parts, axis=axis))
