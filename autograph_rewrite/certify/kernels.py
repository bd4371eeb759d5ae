"""Numpy kernels of the ops that reshards consist of.

Written from TensorFlow's documentation, and tested against TensorFlow's kernels (tests/certify/test_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes

Kernel = Callable[[Node, Sequence[Any]], Sequence[Any]]


class NoKernelError(Exception):
    """Nothing here says what an op computes."""


def as_numpy(dtype: int) -> Any:
    """Return the numpy type in which an element type is simulated."""
    return dtypes.numpy_dtype(dtype) or (np.dtype(np.float32) if dtype == dtypes.BFLOAT16 else np.dtype(object))


def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of one instance of a node.

    Raises:
        NoKernelError: the op has no kernel here.
    """
    kernel = KERNELS.get(node.op)
    if kernel is None:
        raise NoKernelError(node.op)
    return kernel(node, inputs)


def _of(function: Callable[..., Any]) -> Kernel:
    return lambda node, inputs: [np.asarray(function(*inputs))]


def _kept(function: Callable[..., Any]) -> Kernel:
    """Make a kernel whose result has the type of its first input."""
    return lambda node, inputs: [np.asarray(function(*inputs)).astype(np.asarray(inputs[0]).dtype)]


def _axes(operand: Any) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.atleast_1d(operand))


def _fold(function: Callable[..., Any]) -> Kernel:
    def kernel(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
        result = function(inputs[0], axis=_axes(inputs[1]), keepdims=bool(node.attr("keep_dims", False)))
        return [np.asarray(result).astype(np.asarray(inputs[0]).dtype)]

    return kernel


def _strided_slice(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    source, begin, end, step = inputs
    return [np.asarray(source[_sliced(node, begin, end, step)])]


def _strided_slice_grad(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    shape, begin, end, step, rows = inputs
    whole = np.zeros([int(n) for n in shape], np.asarray(rows).dtype)
    at = _sliced(node, begin, end, step)
    if whole[at].shape != np.shape(rows):
        raise ValueError(f"{np.shape(rows)} rows of {whole[at].shape}")
    whole[at] = rows
    return [whole]


def _sliced(node: Node, begin: Any, end: Any, step: Any) -> tuple[Any, ...]:
    """Return a slice as numpy writes it."""
    masks = {name: node.attr(f"{name}_mask", 0) for name in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")}
    at: list[Any] = []
    for i in range(len(begin)):
        is_open = {name: mask >> i & 1 for name, mask in masks.items()}
        first, last = None if is_open["begin"] else int(begin[i]), None if is_open["end"] else int(end[i])
        if is_open["ellipsis"] or is_open["new_axis"]:
            at.append(Ellipsis if is_open["ellipsis"] else None)
        else:
            at.append(int(begin[i]) if is_open["shrink_axis"] else slice(first, last, int(step[i])))
    return tuple(at)


def _slice(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    source, begin, size = inputs
    ends = [rows if n < 0 else int(b) + int(n) for rows, b, n in zip(np.shape(source), begin, size, strict=True)]
    if any(not 0 <= b <= e <= rows for rows, b, e in zip(np.shape(source), begin, ends, strict=True)):
        raise ValueError(f"{list(begin)} to {ends} of {np.shape(source)}")
    return [source[tuple(slice(int(b), e) for b, e in zip(begin, ends, strict=True))]]


def _cast(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.asarray(inputs[0]).astype(as_numpy(node.attr("DstT")))]


def _reshape(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.reshape(inputs[0], [int(n) for n in inputs[1]])]


def _gather(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    axis = int(inputs[2]) if len(inputs) > 2 else 0
    where, batch_dims = np.asarray(inputs[1], np.int64), node.attr("batch_dims", 0)
    return [_taken(inputs[0], where, axis % np.ndim(inputs[0]), batch_dims + (batch_dims < 0) * where.ndim)]


def _taken(table: Any, where: Any, axis: int, batch_dims: int) -> Any:
    if batch_dims:
        return np.stack([_taken(t, w, axis - 1, batch_dims - 1) for t, w in zip(table, where, strict=True)])
    if where.size and where.min() < 0:
        raise IndexError("a number below 0")
    return np.take(table, where, axis)


def _scattered(change: Callable[..., Any]) -> Kernel:
    """Make a kernel that changes rows of a table, of which `change` is told the places and the rows."""

    def kernel(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
        table, where, rows = inputs
        made = np.array(table)
        at = tuple(np.moveaxis(np.asarray(where, np.int64), -1, 0))
        if made[at].shape != np.shape(rows):
            raise ValueError(f"{np.shape(rows)} rows for {made[at].shape}")
        change(made, at, rows)
        return [made]

    return kernel


def _assign(table: Any, at: Any, rows: Any) -> None:
    table[at] = rows


def _scatter_nd(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    where, rows, shape = inputs
    return _scattered(np.add.at)(node, [np.zeros([int(n) for n in shape], np.asarray(rows).dtype), where, rows])


def _segments(change: Callable[..., Any], first: Callable[[Any], Any]) -> Kernel:
    """Make a kernel that folds rows by segment, beginning with `first` of their type."""

    def kernel(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
        rows, where, count = np.asarray(inputs[0]), np.asarray(inputs[1], np.int64), int(inputs[2])
        if rows.shape[: where.ndim] != where.shape or (where.size and where.max() >= count):
            raise ValueError(f"{where.shape} numbers for {rows.shape}, in {count} segments")
        made = np.full((count, *rows.shape[where.ndim :]), first(rows.dtype), rows.dtype)
        kept = where >= 0
        change(made, where[kept], rows[kept])
        return [made]

    return kernel


def _limit(name: str) -> Callable[[Any], Any]:
    return lambda kind: getattr(np.finfo(kind) if np.dtype(kind).kind == "f" else np.iinfo(kind), name)


def _norm(values: Any, axis: Any, keepdims: bool) -> Any:
    return np.sqrt(np.sum(np.abs(values) ** 2, axis=axis, keepdims=keepdims))


def _split(sizes: list[int], value: Any, axis: int) -> Sequence[Any]:
    if sizes.count(-1) == 1:  # what the others leave
        sizes = [value.shape[axis] - sum(sizes) - 1 if size == -1 else size for size in sizes]
    if sum(sizes) != value.shape[axis]:
        raise ValueError(f"parts of {list(sizes)} of {value.shape[axis]}")
    return np.split(value, np.cumsum(sizes)[:-1], axis)


def _unpack(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    axis = node.attr("axis", 0)
    parts = np.moveaxis(inputs[0], axis, 0)
    if len(parts) != node.attr("num"):
        raise ValueError(f"{len(parts)} parts, not {node.attr('num')}")
    return list(parts)


def _floor_div(a: Any, b: Any) -> Any:
    return np.asarray(a) // np.asarray(b)


def _pad(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    fill = inputs[2] if len(inputs) > 2 else np.zeros((), np.asarray(inputs[0]).dtype)
    return [np.pad(inputs[0], [(int(a), int(b)) for a, b in inputs[1]], constant_values=fill)]


def _shape(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    kind = as_numpy(node.output_dtypes[0])
    return [np.array(np.shape(value), kind) for value in inputs]


def _size(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.array(np.size(inputs[0]), as_numpy(node.output_dtypes[0]))]


def _range(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.arange(*[int(n) for n in inputs], dtype=as_numpy(node.output_dtypes[0]))]


def _invert(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.argsort(inputs[0], kind="stable").astype(np.asarray(inputs[0]).dtype)]


def _where(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.argwhere(inputs[0]).astype(np.int64)]


def _transpose(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.transpose(inputs[0], _axes(inputs[1]))]


def _squeeze(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.squeeze(inputs[0], tuple(node.attr("squeeze_dims") or ()) or None)]


def _gather_nd(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    where = np.asarray(inputs[1], np.int64)
    return [inputs[0][tuple(np.moveaxis(where, -1, 0))]]


def _reverse(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return [np.flip(inputs[0], _axes(inputs[1]))]


def _broadcast_gradient_args(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return for each shape the dimensions that broadcasting stretches, or adds; and those that are 1 in both."""
    rank = max(len(shape) for shape in inputs)
    padded = [[1] * (rank - len(shape)) + [int(n) for n in shape] for shape in inputs]
    np.broadcast_shapes(*map(tuple, padded))
    same = np.array_equal(*inputs)
    kind = np.asarray(inputs[0]).dtype
    return [np.array([i for i in range(rank) if one[i] == 1 and not same], kind) for one in padded]


def _broadcast_args(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    shapes = [tuple(int(n) for n in shape) for shape in inputs]
    return [np.array(np.broadcast_shapes(*shapes), np.asarray(inputs[0]).dtype)]


def _concat_offset(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    axis, shapes = int(inputs[0]), [np.asarray(shape) for shape in inputs[1:]]
    if any(np.delete(shape, axis).tolist() != np.delete(shapes[0], axis).tolist() for shape in shapes):
        raise ValueError("blocks are cut along other dimensions, which its kernel compares")
    found, offset = [], 0
    for shape in shapes:
        start = np.zeros_like(shape)
        start[axis] = offset
        found.append(start)
        offset += shape[axis]
    return found


def _dynamic_stitch(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    half = len(inputs) // 2
    places = [np.asarray(places, np.int64) for places in inputs[:half]]
    row = np.shape(inputs[half])[places[0].ndim :]
    count = max((int(one.max()) + 1 for one in places if one.size), default=0)
    joined = np.zeros((count, *row), np.asarray(inputs[half]).dtype)
    for where, rows in zip(places, inputs[half:], strict=True):
        joined[where.reshape(-1)] = np.reshape(rows, (-1, *row))
    return [joined]


def _division(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(a) / np.asarray(b)


def _forward(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    return list(inputs)


KERNELS: Mapping[str, Kernel] = {
    "AddN": lambda node, inputs: [sum(inputs[1:], np.asarray(inputs[0]))],
    "AddV2": _of(np.add),
    "Add": _of(np.add),
    "Sub": _of(np.subtract),
    "Mul": _kept(np.multiply),
    "RealDiv": _kept(_division),
    "FloorDiv": _of(_floor_div),
    "FloorMod": _of(np.mod),
    "Minimum": _of(np.minimum),
    "Maximum": _of(np.maximum),
    "Neg": _of(np.negative),
    "Less": _of(np.less),
    "LessEqual": _of(np.less_equal),
    "Greater": _of(np.greater),
    "GreaterEqual": _of(np.greater_equal),
    "Equal": _of(np.equal),
    "LogicalAnd": _of(np.logical_and),
    "LogicalOr": _of(np.logical_or),
    "LogicalNot": _of(np.logical_not),
    "BitwiseAnd": _of(np.bitwise_and),
    "SelectV2": _of(np.where),
    "ZerosLike": _of(np.zeros_like),
    "OnesLike": _of(np.ones_like),
    "Identity": _forward,
    "EnsureShape": _forward,
    "IdentityN": _forward,
    "Enter": _forward,
    "StopGradient": _forward,
    "Cast": _cast,
    "Reshape": _reshape,
    "Shape": _shape,
    "ShapeN": _shape,
    "Size": _size,
    "Range": _range,
    "StridedSlice": _strided_slice,
    "StridedSliceGrad": _strided_slice_grad,
    "Tile": lambda node, inputs: [np.tile(inputs[0], [int(n) for n in inputs[1]])],
    "ScatterNd": _scatter_nd,
    "TensorScatterUpdate": _scattered(_assign),
    "TensorScatterAdd": _scattered(np.add.at),
    "TensorScatterSub": _scattered(np.subtract.at),
    "TensorScatterMin": _scattered(np.minimum.at),
    "TensorScatterMax": _scattered(np.maximum.at),
    "UnsortedSegmentSum": _segments(np.add.at, lambda kind: 0),
    "UnsortedSegmentProd": _segments(np.multiply.at, lambda kind: 1),
    "UnsortedSegmentMax": _segments(np.maximum.at, _limit("min")),
    "UnsortedSegmentMin": _segments(np.minimum.at, _limit("max")),
    "Gather": _gather,
    "Concat": lambda node, inputs: [np.concatenate(inputs[1:], int(inputs[0]))],
    "ConjugateTranspose": lambda node, inputs: [np.conj(np.transpose(inputs[0], _axes(inputs[1])))],
    "Mean": _fold(np.mean),
    "EuclideanNorm": _fold(_norm),
    "Slice": _slice,
    "GatherV2": _gather,
    "GatherNd": _gather_nd,
    "ConcatV2": lambda node, inputs: [np.concatenate(inputs[:-1], int(inputs[-1]))],
    "Pack": lambda node, inputs: [np.stack(inputs, node.attr("axis", 0))],
    "Unpack": _unpack,
    "Split": lambda node, inputs: np.split(inputs[1], node.attr("num_split"), int(inputs[0])),
    "SplitV": lambda node, inputs: _split([int(n) for n in inputs[1]], inputs[0], int(inputs[2])),
    "ExpandDims": lambda node, inputs: [np.expand_dims(inputs[0], int(inputs[1]))],
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Pad": _pad,
    "PadV2": _pad,
    "Fill": lambda node, inputs: [np.full([int(n) for n in inputs[0]], inputs[1])],
    "Sum": _fold(np.sum),
    "Max": _fold(np.max),
    "Min": _fold(np.min),
    "Prod": _fold(np.prod),
    "All": _fold(np.all),
    "Any": _fold(np.any),
    "InvertPermutation": _invert,
    "Where": _where,
    "BroadcastGradientArgs": _broadcast_gradient_args,
    "BroadcastArgs": _broadcast_args,
    "ConcatOffset": _concat_offset,
    "DynamicStitch": _dynamic_stitch,
    "ReverseV2": _reverse,
}
"""By op."""


def constant(raw: Any) -> Any:
    """Return the contents of a constant as this module computes with them."""
    if isinstance(raw, np.ndarray):
        return raw
    raise NoKernelError("Const")
