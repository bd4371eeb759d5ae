"""Computes, in numpy, the ops that reshards are lowered to, and ops that move elements or reduce them.

Written from TensorFlow's documentation, and tested against TensorFlow's kernels (tests/certify/test_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes

Kernel = Callable[..., Any]
"""Takes a node and its inputs; returns the output, or a list of them."""


class UnknownError(Exception):
    """A value is unknown to the certificate; the message says why."""


class NoKernelError(UnknownError):
    """An op has no kernel here."""


def as_numpy(dtype: int) -> Any:
    """Return the numpy type in which an element type is simulated."""
    return dtypes.numpy_dtype(dtype) or (np.dtype(np.float32) if dtype == dtypes.BFLOAT16 else np.dtype(object))


def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of one instance of a node.

    Raises:
        NoKernelError: the op has no kernel here.
    """
    if node.op not in KERNELS:
        raise NoKernelError(node.op)
    with np.errstate(divide="ignore", invalid="ignore"):
        made = KERNELS[node.op](node, *inputs)
    return made if isinstance(made, list | tuple) else [made]


def _ints(numbers: Any) -> list[int]:
    return [int(number) for number in np.atleast_1d(numbers)]


def _of(function: Callable[..., Any]) -> Kernel:
    return lambda node, *inputs: np.asarray(function(*inputs))


def _kept(function: Callable[..., Any]) -> Kernel:
    """Make a kernel whose result has the type of its first input."""
    return lambda node, *inputs: np.asarray(function(*inputs)).astype(np.asarray(inputs[0]).dtype)


def _fold(function: Callable[..., Any]) -> Kernel:
    def kernel(node: Node, x: Any, axes: Any) -> Any:
        folded = function(x, axis=tuple(_ints(axes)), keepdims=bool(node.attr("keep_dims", False)))
        return np.asarray(folded).astype(np.asarray(x).dtype)

    return kernel


def _slice(node: Node, x: Any, begin: Any, size: Any) -> Any:
    ends = [rows if n < 0 else int(b) + int(n) for rows, b, n in zip(np.shape(x), begin, size, strict=True)]
    if any(not 0 <= b <= e <= rows for rows, b, e in zip(np.shape(x), begin, ends, strict=True)):
        raise ValueError(f"{list(begin)} to {ends} of {np.shape(x)}")
    return x[tuple(slice(int(b), e) for b, e in zip(begin, ends, strict=True))]


def _sliced(node: Node, begin: Any, end: Any, step: Any) -> tuple[Any, ...]:
    """Return a slice as numpy writes it."""
    masks = {name: node.attr(f"{name}_mask", 0) for name in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")}
    at: list[Any] = []
    for i in range(len(begin)):
        has = {name: mask >> i & 1 for name, mask in masks.items()}
        first, last = None if has["begin"] else int(begin[i]), None if has["end"] else int(end[i])
        if has["ellipsis"] or has["new_axis"]:
            at.append(Ellipsis if has["ellipsis"] else None)
        else:
            at.append(int(begin[i]) if has["shrink_axis"] else slice(first, last, int(step[i])))
    return tuple(at)


def _changed(table: Any, at: Any, rows: Any, change: Callable[..., Any]) -> Any:
    """Return a copy of a table after `change` has applied rows to some places."""
    made = np.array(table)
    if made[at].shape != np.shape(rows):
        raise ValueError(f"{np.shape(rows)} rows for {made[at].shape}")
    change(made, at, rows)
    return made


def _strided_slice_grad(node: Node, shape: Any, begin: Any, end: Any, step: Any, rows: Any) -> Any:
    return _changed(_zeros(shape, rows), _sliced(node, begin, end, step), rows, np.ndarray.__setitem__)


def _zeros(shape: Any, like: Any) -> Any:
    return np.zeros(_ints(shape), np.asarray(like).dtype)


def _places(where: Any) -> tuple[Any, ...]:
    return tuple(np.moveaxis(np.asarray(where, np.int64), -1, 0))


def _scattered(change: Callable[..., Any]) -> Kernel:
    return lambda node, table, where, rows: _changed(table, _places(where), rows, change)


def _segments(change: Callable[..., Any], first: Callable[[Any], Any]) -> Kernel:
    """Make a kernel that reduces rows by segment, starting from `first` of their type."""

    def kernel(node: Node, rows: Any, where: Any, count: Any) -> Any:
        if rows.shape[: where.ndim] != where.shape or (where.size and where.max() >= count):
            raise ValueError(f"{where.shape} numbers for {rows.shape}, in {count} segments")
        made = np.full((int(count), *rows.shape[where.ndim :]), first(rows.dtype), rows.dtype)
        change(made, where[where >= 0].astype(np.int64), rows[where >= 0])
        return made

    return kernel


def _limit(name: str) -> Callable[[Any], Any]:
    return lambda kind: getattr(np.finfo(kind) if kind.kind == "f" else np.iinfo(kind), name)


def _gather(node: Node, table: Any, where: Any, axis: Any = 0) -> Any:
    where, batch_dims = np.asarray(where, np.int64), node.attr("batch_dims", 0)
    return _taken(table, where, int(axis) % np.ndim(table), batch_dims + (batch_dims < 0) * where.ndim)


def _taken(table: Any, where: Any, axis: int, batch_dims: int) -> Any:
    if batch_dims:
        return np.stack([_taken(t, w, axis - 1, batch_dims - 1) for t, w in zip(table, where, strict=True)])
    if where.size and where.min() < 0:
        raise IndexError("a number below 0")
    return np.take(table, where, axis)


def _split(node: Node, x: Any, sizes: Any, axis: Any) -> list[Any]:
    sizes, there = _ints(sizes), x.shape[int(axis)]
    if sizes.count(-1) == 1:  # the rest of the rows
        sizes = [there - sum(sizes) - 1 if size == -1 else size for size in sizes]
    if sum(sizes) != there:
        raise ValueError(f"parts of {sizes} of {there}")
    return np.split(x, np.cumsum(sizes)[:-1], int(axis))


def _unpack(node: Node, x: Any) -> list[Any]:
    parts = list(np.moveaxis(x, node.attr("axis", 0), 0))
    if len(parts) != node.attr("num"):
        raise ValueError(f"{len(parts)} parts, not {node.attr('num')}")
    return parts


def _pad(node: Node, x: Any, pads: Any, fill: Any = None) -> Any:
    widths, nothing = [(int(a), int(b)) for a, b in pads], np.zeros((), np.asarray(x).dtype)
    return np.pad(x, widths, constant_values=nothing if fill is None else fill)


def _shape(node: Node, *inputs: Any) -> list[Any]:
    return [np.array(np.shape(value), as_numpy(node.output_dtypes[0])) for value in inputs]


def _broadcast_gradient_args(node: Node, *shapes: Any) -> list[Any]:
    """Return for each shape the dimensions that broadcasting stretches or adds, and those that are 1 in both."""
    rank = max(len(shape) for shape in shapes)
    padded = [[1] * (rank - len(shape)) + _ints(shape) for shape in shapes]
    np.broadcast_shapes(*map(tuple, padded))
    same, kind = np.array_equal(*shapes), np.asarray(shapes[0]).dtype
    return [np.array([i for i in range(rank) if one[i] == 1 and not same], kind) for one in padded]


def _broadcast_args(*shapes: Any) -> Any:
    return np.broadcast_shapes(*(tuple(_ints(shape)) for shape in shapes))


def _concat_offset(node: Node, axis: Any, *shapes: Any) -> list[Any]:
    if any(np.delete(shape, axis).tolist() != np.delete(shapes[0], axis).tolist() for shape in shapes):
        raise ValueError("blocks are cut along other dimensions, which its kernel compares")
    along, kind = np.arange(len(shapes[0])) == axis % len(shapes[0]), np.asarray(shapes[0]).dtype
    begins = np.cumsum([0, *(shape[axis] for shape in shapes[:-1])])
    return [np.where(along, begin, 0).astype(kind) for begin in begins]


def _dynamic_stitch(node: Node, *inputs: Any) -> Any:
    half = len(inputs) // 2
    places = [np.asarray(places, np.int64) for places in inputs[:half]]
    row = np.shape(inputs[half])[places[0].ndim :]
    joined = _zeros((max((int(one.max()) + 1 for one in places if one.size), default=0), *row), inputs[half])
    for where, rows in zip(places, inputs[half:], strict=True):
        joined[where.reshape(-1)] = np.reshape(rows, (-1, *row))
    return joined


def _ensure_shape(node: Node, x: Any) -> Any:
    stated = node.attr("shape")
    if stated is not None and (
        len(stated) != x.ndim or any(a not in (None, b) for a, b in zip(stated, x.shape, strict=False))
    ):
        raise ValueError(f"{x.shape} is not {stated}")
    return x


def _bitcast(node: Node, x: Any) -> Any:
    """Return the same bits: narrower elements add a last dimension, wider elements remove it."""
    new, x = as_numpy(node.output_dtypes[0]), np.ascontiguousarray(x)
    if new.itemsize == x.dtype.itemsize:
        return x.view(new)
    return x[..., None].view(new) if new.itemsize < x.dtype.itemsize else x.view(new).squeeze(-1)


def _extreme(function: Callable[..., Any]) -> Kernel:
    return lambda node, x, axis: function(x, int(axis)).astype(as_numpy(node.output_dtypes[0]))


def _one_hot(node: Node, where: Any, depth: Any, on: Any, off: Any) -> Any:
    axis = node.attr("axis", -1)
    numbers = np.arange(int(depth)).reshape([-1] + [1] * (np.ndim(where) - axis if axis >= 0 else 0))
    return np.where(np.expand_dims(where, axis) == numbers, on, off)


def _reverse_sequence(node: Node, x: Any, lengths: Any) -> Any:
    along, batch = node.attr("seq_dim"), node.attr("batch_dim", 0)
    made = np.moveaxis(np.array(x), (batch, along), (0, 1))
    for row, count in zip(made, _ints(lengths) if np.size(lengths) else [], strict=True):
        if count > len(row):
            raise ValueError(f"{count} of {len(row)}")
        row[:count] = row[:count][::-1].copy()
    return np.moveaxis(made, (0, 1), (batch, along))


def _norm(x: Any, axis: Any, keepdims: bool) -> Any:
    return np.sqrt(np.sum(np.abs(x) ** 2, axis=axis, keepdims=keepdims))


ELEMENTWISE = """
AddV2 add | Add add | Sub subtract | FloorDiv floor_divide | FloorMod mod | Minimum minimum | Maximum maximum
Neg negative | Less less | LessEqual less_equal | Greater greater | GreaterEqual greater_equal | Equal equal
LogicalAnd logical_and | LogicalOr logical_or | LogicalNot logical_not | BitwiseAnd bitwise_and | SelectV2 where
ZerosLike zeros_like | OnesLike ones_like
"""
"""Ops, each with the equivalent function of numpy."""

KERNELS: Mapping[str, Kernel] = {
    **{
        op: _of(getattr(np, name)) for op, name in map(str.split, ELEMENTWISE.strip().replace("\n", " | ").split(" | "))
    },
    **dict.fromkeys(("Identity", "IdentityN", "Enter", "StopGradient"), lambda node, *inputs: inputs),
    "EnsureShape": _ensure_shape,
    "Bitcast": _bitcast,
    "ArgMax": _extreme(np.argmax),
    "ArgMin": _extreme(np.argmin),
    "OneHot": _one_hot,
    "Roll": lambda node, x, by, axes: np.roll(x, _ints(by), _ints(axes)),
    "ReverseSequence": _reverse_sequence,
    **{op: _fold(getattr(np, op.lower())) for op in ("Sum", "Max", "Min", "Prod", "All", "Any", "Mean")},
    "EuclideanNorm": _fold(_norm),
    "AddN": lambda node, *terms: sum(terms[1:], np.asarray(terms[0])),
    "Mul": _kept(np.multiply),
    "RealDiv": _kept(np.divide),
    "Cast": lambda node, x: np.asarray(x).astype(as_numpy(node.attr("DstT"))),
    "Reshape": lambda node, x, shape: np.reshape(x, _ints(shape)),
    "Shape": _shape,
    "ShapeN": _shape,
    "Size": lambda node, x: np.array(np.size(x), as_numpy(node.output_dtypes[0])),
    "Range": lambda node, *ends: np.arange(*map(int, ends), dtype=as_numpy(node.output_dtypes[0])),
    "Slice": _slice,
    "StridedSlice": lambda node, x, *bounds: np.asarray(x[_sliced(node, *bounds)]),
    "StridedSliceGrad": _strided_slice_grad,
    "Tile": lambda node, x, times: np.tile(x, _ints(times)),
    "Gather": _gather,
    "GatherV2": _gather,
    "GatherNd": lambda node, x, where: x[_places(where)],
    "ScatterNd": lambda node, at, rows, shape: _changed(_zeros(shape, rows), _places(at), rows, np.add.at),
    "TensorScatterUpdate": _scattered(np.ndarray.__setitem__),
    "TensorScatterAdd": _scattered(np.add.at),
    "TensorScatterSub": _scattered(np.subtract.at),
    "TensorScatterMin": _scattered(np.minimum.at),
    "TensorScatterMax": _scattered(np.maximum.at),
    "UnsortedSegmentSum": _segments(np.add.at, lambda kind: 0),
    "UnsortedSegmentProd": _segments(np.multiply.at, lambda kind: 1),
    "UnsortedSegmentMax": _segments(np.maximum.at, _limit("min")),
    "UnsortedSegmentMin": _segments(np.minimum.at, _limit("max")),
    "Concat": lambda node, axis, *parts: np.concatenate(parts, int(axis)),
    "ConcatV2": lambda node, *inputs: np.concatenate(inputs[:-1], int(inputs[-1])),
    "Pack": lambda node, *parts: np.stack(parts, node.attr("axis", 0)),
    "Unpack": _unpack,
    "Split": lambda node, axis, x: np.split(x, node.attr("num_split"), int(axis)),
    "SplitV": _split,
    "ExpandDims": lambda node, x, axis: np.expand_dims(x, int(axis)),
    "Squeeze": lambda node, x: np.squeeze(x, tuple(node.attr("squeeze_dims") or ()) or None),
    "Transpose": lambda node, x, order: np.transpose(x, _ints(order)),
    "ConjugateTranspose": lambda node, x, order: np.conj(np.transpose(x, _ints(order))),
    "Pad": _pad,
    "PadV2": _pad,
    "Fill": lambda node, shape, x: np.full(_ints(shape), x),
    "InvertPermutation": lambda node, x: np.argsort(x, kind="stable").astype(np.asarray(x).dtype),
    "Where": lambda node, x: np.argwhere(x).astype(np.int64),
    "BroadcastGradientArgs": _broadcast_gradient_args,
    "BroadcastArgs": _kept(_broadcast_args),
    "ConcatOffset": _concat_offset,
    "DynamicStitch": _dynamic_stitch,
    "ReverseV2": lambda node, x, axes: np.flip(x, tuple(_ints(axes))),
}
"""By op."""


def constant(raw: Any) -> Any:
    """Return the contents of a constant as an array."""
    if isinstance(raw, np.ndarray):
        return raw
    raise NoKernelError("Const")
