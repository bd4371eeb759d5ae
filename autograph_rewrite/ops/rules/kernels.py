"""Kernels of integer ops for constant folding, in numpy: what each makes of its operands; None where it cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ops.rules.base import Attr

Array = np.ndarray[Any, Any]
Kernel = Callable[[Attr, Sequence[Array]], Any]

LONGEST = 64


def _elementwise(function: Callable[..., Any]) -> Kernel:
    return lambda attr, inputs: function(*inputs)


def _reduction(function: Callable[..., Any]) -> Kernel:
    def evaluate(attr: Attr, inputs: Sequence[Array]) -> Any:
        value, axes = inputs
        return function(value, axis=tuple(int(a) for a in axes.ravel()), keepdims=bool(attr("keep_dims")))

    return evaluate


def _truncated(divide: bool) -> Kernel:
    def evaluate(attr: Attr, inputs: Sequence[Array]) -> Any:
        x, y = inputs
        quotient = np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))
        return quotient if divide else x - quotient * y

    return evaluate


def _strided_slice(attr: Attr, inputs: Sequence[Array]) -> Any:
    value, begin, end, strides = inputs
    masks = {key: int(attr(f"{key}_mask")) for key in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    index: list[Any] = []
    for i in range(len(begin)):
        if masks["ellipsis"] >> i & 1:
            index.append(Ellipsis)
        elif masks["new_axis"] >> i & 1:
            index.append(None)
        elif masks["shrink_axis"] >> i & 1:
            index.append(int(begin[i]))
        else:
            first = None if masks["begin"] >> i & 1 else int(begin[i])
            last = None if masks["end"] >> i & 1 else int(end[i])
            index.append(slice(first, last, int(strides[i])))
    return value[tuple(index)]


def _slice(attr: Attr, inputs: Sequence[Array]) -> Any:
    value, begin, size = inputs
    return value[tuple(slice(int(b), None if s == -1 else int(b) + int(s)) for b, s in zip(begin, size, strict=True))]


def _gather(attr: Attr, inputs: Sequence[Array]) -> Any:
    value, indices = inputs[0], inputs[1]
    axis = int(inputs[2]) if len(inputs) > 2 else 0
    if attr("batch_dims", 0) or (indices < 0).any():
        return None
    return np.take(value, indices, axis=axis)


def _dynamic_stitch(attr: Attr, inputs: Sequence[Array]) -> Any:
    half = len(inputs) // 2
    indices, data = inputs[:half], inputs[half:]
    if any(i.shape != d.shape for i, d in zip(indices, data, strict=True)):
        return None
    size = max(int(i.max(initial=-1)) for i in indices) + 1
    if size > LONGEST:
        return None
    result = np.zeros(size, data[0].dtype)
    written = np.zeros(size, bool)
    for index, values in zip(indices, data, strict=True):
        result[index], written[index] = values, True
    return result if written.all() else None


def _inverse(attr: Attr, inputs: Sequence[Array]) -> Any:
    return np.argsort(inputs[0])


def _squeeze(attr: Attr, inputs: Sequence[Array]) -> Any:
    axes = attr("squeeze_dims", ())
    return np.squeeze(inputs[0], axis=tuple(axes) or None)


def _tile(attr: Attr, inputs: Sequence[Array]) -> Any:
    value, multiples = inputs
    if value.size * math.prod(int(i) for i in multiples) > LONGEST or len(multiples) != value.ndim:
        return None
    return np.tile(value, tuple(multiples))


def _fill(attr: Attr, inputs: Sequence[Array]) -> Any:
    shape = tuple(int(size) for size in inputs[0])
    return np.full(shape, inputs[1]) if math.prod(shape) <= LONGEST else None


def _range(attr: Attr, inputs: Sequence[Array]) -> Any:
    numbers = range(*(int(i) for i in inputs))
    return np.array(numbers, np.int64) if len(numbers) <= LONGEST else None


KERNELS: Mapping[str, Kernel] = {
    "Identity": lambda attr, inputs: inputs[0],
    "Pack": lambda attr, inputs: np.stack(inputs, axis=attr("axis")),
    "ConcatV2": lambda attr, inputs: np.concatenate(inputs[:-1], axis=int(inputs[-1])),
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "GatherV2": _gather,
    "Gather": _gather,
    "DynamicStitch": _dynamic_stitch,
    "InvertPermutation": _inverse,
    "Reshape": lambda attr, inputs: inputs[0].reshape(inputs[1]),
    "Squeeze": _squeeze,
    "ExpandDims": lambda attr, inputs: np.expand_dims(inputs[0], int(inputs[1])),
    "Tile": _tile,
    "Fill": _fill,
    "Range": _range,
    "Cast": lambda attr, inputs: inputs[0],
    "Add": _elementwise(np.add),
    "AddV2": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "FloorDiv": _elementwise(np.floor_divide),
    "FloorMod": _elementwise(np.mod),
    "TruncateDiv": _truncated(True),
    "Div": _truncated(True),
    "TruncateMod": _truncated(False),
    "Mod": _truncated(False),
    "Maximum": _elementwise(np.maximum),
    "Minimum": _elementwise(np.minimum),
    "Neg": _elementwise(np.negative),
    "Prod": _reduction(np.prod),
    "Sum": _reduction(np.sum),
    "Max": _reduction(np.max),
    "Min": _reduction(np.min),
}
