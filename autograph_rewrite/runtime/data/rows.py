"""Row operations on batches of a tf.data pipeline: whether there are any, one worker's slice, the empty slice."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.plan.parts.batch_split import block_begin, bounds
from autograph_rewrite.requires import tensorflow


def is_batched(dataset: Any) -> bool:
    """Return whether everything that a dataset gives has a dimension that can count examples."""
    leaves = tensorflow().nest.flatten(dataset.element_spec)
    ranks = [leaf.shape.rank for leaf in leaves]
    return bool(ranks) and all(rank is None or rank > 0 for rank in ranks)


def batch_size(batch: Any) -> Any:
    """Return how many examples a batch has."""
    return _size(tensorflow().nest.flatten(batch)[0])


def rows(batch: Any, workers: int, task: int) -> Any:
    """Return the part of a batch that one of several workers takes: contiguous, the first ones get one row more.

    Args:
        batch: nested tensors whose dimension 0 counts examples.
        workers: how many share it.
        task: number of this worker.
    """
    return tensorflow().nest.map_structure(lambda leaf: _rows(leaf, workers, task), batch)


def _rows(leaf: Any, workers: int, task: int) -> Any:
    tf = tensorflow()
    if isinstance(leaf, tf.SparseTensor):
        begin, end = _limits(_size(leaf), workers, task)
        first = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, first, tf.concat([[end - begin], leaf.dense_shape[1:]], 0))
    if not isinstance(leaf, tf.RaggedTensor) and leaf.shape[0] is not None:
        ends = bounds(leaf.shape[0], workers)
        return leaf[ends[task] : ends[task + 1]]
    begin, end = _limits(_size(leaf), workers, task)
    return leaf[begin:end]


def _size(leaf: Any) -> Any:
    tf = tensorflow()
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf, tf.int64)[0]


def _limits(size: Any, workers: int, task: int) -> tuple[Any, Any]:
    raw = tensorflow().raw_ops
    each, more = size // workers, size % workers
    begin, end = (
        block_begin(np.int64(at), each, more, lambda op, a, b: getattr(raw, op)(x=a, y=b)) for at in (task, task + 1)
    )
    return begin, end


def empty(leaf: Any) -> Any:
    """Return what is like a part of a batch, without rows."""
    tf = tensorflow()
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.slice(leaf, tf.zeros_like(leaf.dense_shape), tf.concat([[0], leaf.dense_shape[1:]], 0))
    return leaf[:0]


def lengths(batch: Any, spec: Any) -> list[int]:
    """Return the lengths of a batch that its spec leaves open, besides the number of rows; zeros for None."""
    leaves = _leaves(batch) if batch is not None else [None] * len(_leaves(spec))
    return [
        0 if leaf is None else int(leaf.shape[dim])
        for leaf, of in zip(leaves, _leaves(spec), strict=True)
        for dim in _open(of)
    ]


def none_of(spec: Any, sizes: Sequence[int] = (), last: Any = None) -> Any:
    """Return an element without rows.

    Args:
        sizes: the `lengths` that it has; what else is not known of its shape is empty, too.
        last: the element before it, like which it is where the spec says too little.
    """
    known = iter(sizes)
    before = _leaves(last) if last is not None else [None] * len(_leaves(spec))
    found = [_none(of, known, leaf) for of, leaf in zip(_leaves(spec), before, strict=True)]
    return tensorflow().nest.pack_sequence_as(spec, found)


def _leaves(nested: Any) -> list[Any]:
    leaves: list[Any] = tensorflow().nest.flatten(nested)
    return leaves


def _open(spec: Any) -> list[int]:
    """Return the dimensions that a spec leaves open, besides that of the rows."""
    if isinstance(spec, tensorflow().RaggedTensorSpec) or spec.shape.rank is None:
        return []
    return [dim for dim, size in enumerate(spec.shape.as_list()) if dim and size is None]


def _none(spec: Any, known: Iterator[int], last: Any) -> Any:
    tf = tensorflow()
    is_ragged = isinstance(spec, tf.RaggedTensorSpec)
    if last is not None and (is_ragged or spec.shape.rank is None):
        return empty(last)
    if is_ragged:
        inner = (
            spec.flat_values_spec.shape[1:] if spec.flat_values_spec is not None else spec.shape[spec.ragged_rank + 1 :]
        )
        values = tf.zeros([0, *_sizes(inner, iter(()))], spec.dtype)
        for _ in range(spec.ragged_rank):
            values = tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype))
        return values
    sizes = [0, *_sizes(spec.shape[1:], known)]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(np.zeros([0, len(sizes)], np.int64), tf.zeros([0], spec.dtype), sizes)
    return tf.zeros(sizes, spec.dtype)


def _sizes(shape: Any, known: Iterator[int]) -> list[int]:
    return [next(known, 0) if size is None else size for size in shape.as_list()]


def checksum(leaves: Iterable[Any]) -> int:
    """Return a number that differs where the contents do."""
    total = 0
    for leaf in leaves:
        array = np.asarray(leaf)
        data = "\0".join(map(repr, array.ravel())).encode() if array.dtype == object else array.tobytes()
        total = zlib.crc32(repr(array.shape).encode() + data, total)
    return total
