"""Computes integer ops in numpy, from the contents of their operands; None where a kernel cannot compute the result.

Constant folding runs the kernels on numbers; propagation runs them on sizes, which may be symbols: arrays of objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym, divide, times
from autograph_rewrite.ops.rules.base import Attr, Op, Values

Array = npt.NDArray[np.object_]
Kernel = Callable[[Attr, Sequence[Any]], Any]


def array(n: Op, index: int) -> Array | None:
    """Return the known contents of an input with its static shape, or None."""
    value, shape = n.value(index), n.shape(index)
    if value is None or shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    flat = np.empty(len(value), dtype=object)
    for i, entry in enumerate(value):
        flat[i] = entry
    return flat.reshape([dim for dim in shape if isinstance(dim, int)])


def boxed(value: Dim) -> Array:
    """Return a single size as an array: numpy would unpack a symbol, which is a tuple."""
    box = np.empty((), object)
    box[()] = value
    return box


def flat(values: Array) -> tuple[Dim, ...]:
    """Return contents as a fact's value."""
    return tuple(np.ravel(values).tolist())


def add(a: Dim, b: Dim) -> Dim:
    """Add two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0:
        return b
    if b == 0:
        return a
    if isinstance(a, Sym) and isinstance(b, Sym) and a.factors == b.factors:
        return Sym(a.coef + b.coef, a.factors)
    return None


def subtract(a: Dim, b: Dim) -> Dim:
    """Subtract a size from another."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if b == 0:
        return a
    return 0 if a == b and a is not None else None


def _maximum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    for size, other in ((a, b), (b, a)):
        if isinstance(size, Sym) and (other == size or (isinstance(other, int) and other <= 1)):
            return size  # a size is at least 1, unless the value is empty
    return None


def _minimum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return a if a == b else None


def _floor_div(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else None
    return divide(a, b)


def _truncated_div(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        # Towards zero, as Div of integers does; sizes themselves are never negative.
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else None
    return divide(a, b)


def _floor_mod(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else None
    return 0 if divide(a, b) is not None else None


def _truncated_mod(a: Dim, b: Dim) -> Dim:
    quotient = _truncated_div(a, b)
    return a - quotient * b if isinstance(a, int) and isinstance(b, int) and isinstance(quotient, int) else None


_SIZES: dict[str, Callable[[Dim, Dim], Dim]] = {
    "Mul": times, "Add": add, "AddV2": add, "Sub": subtract, "Maximum": _maximum, "Minimum": _minimum,
    "FloorDiv": _floor_div, "FloorMod": _floor_mod, "Div": _truncated_div, "TruncateDiv": _truncated_div,
}  # fmt: skip
SIZE_ARITHMETIC = tuple(_SIZES)
"""Elementwise ops that also compute sizes."""
_BINARY = _SIZES | {"TruncateMod": _truncated_mod, "Mod": _truncated_mod}
_REDUCTIONS = {"Prod": (times, 1), "Sum": (add, 0), "Max": (_maximum, None), "Min": (_minimum, None)}
MOST_KNOWN = 2**12
"""Most elements of a range (sizes, axes, positions) whose contents are tracked."""
LONGEST = 64


def _elementwise(function: Callable[[Dim, Dim], Dim]) -> Kernel:
    apply = np.frompyfunc(function, 2, 1)

    def evaluate(attr: Attr, inputs: Sequence[Array]) -> Any:
        made = apply(*inputs)
        return made if isinstance(made, np.ndarray) else boxed(made)

    return evaluate


def _reduction(function: Callable[[Dim, Dim], Dim], empty: int | None) -> Kernel:
    apply: Any = np.frompyfunc(function, 2, 1)
    begin = {} if empty is None else {"initial": empty}

    def evaluate(attr: Attr, inputs: Sequence[Array]) -> Any:
        value, axes = inputs
        reduced = tuple({range(value.ndim)[int(axis)] for axis in axes.ravel()})
        for axis in reduced:
            value = apply.reduce(value, axis=axis, keepdims=True, **begin)
        return value if attr("keep_dims", False) else value.squeeze(reduced)

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
    if Ellipsis not in index:
        index.append(Ellipsis)  # with an ellipsis, numpy also returns one element as an array
    return value[tuple(index)]


def _slice(attr: Attr, inputs: Sequence[Array]) -> Any:
    value, begin, size = inputs
    return value[tuple(slice(int(b), None if s == -1 else int(b) + int(s)) for b, s in zip(begin, size, strict=True))]


def _gather(attr: Attr, inputs: Sequence[Array]) -> Any:
    value, indices = inputs[0], inputs[1].astype(np.int64)
    axis = int(inputs[2]) if len(inputs) > 2 else 0
    if attr("batch_dims", 0) or (indices < 0).any():
        return None
    before: list[Any] = [slice(None)] * (axis if axis >= 0 else axis + value.ndim)
    index = (*before, indices, Ellipsis)
    return value[index]


def _dynamic_stitch(attr: Attr, inputs: Sequence[Array]) -> Any:
    half = len(inputs) // 2
    indices, data = [index.astype(np.int64) for index in inputs[:half]], inputs[half:]
    if any(i.shape != d.shape for i, d in zip(indices, data, strict=True)):
        return None
    size = max(int(i.max(initial=-1)) for i in indices) + 1
    if size > LONGEST:
        return None
    result = np.zeros(size, data[0].dtype)
    written = np.zeros(size, bool)
    for index, values in zip(indices, data, strict=True):
        result[index.ravel()], written[index] = values.ravel(), True  # of single elements, too
    return result if written.all() else None


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
    return np.array(numbers, np.int64) if len(numbers) <= MOST_KNOWN else None


KERNELS: Mapping[str, Kernel] = {
    "Identity": lambda attr, inputs: inputs[0],
    "Pack": lambda attr, inputs: np.stack(inputs, axis=attr("axis")),
    "ConcatV2": lambda attr, inputs: np.concatenate(inputs[:-1], axis=int(inputs[-1])),
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "GatherV2": _gather,
    "Gather": _gather,
    **dict.fromkeys(("DynamicStitch", "ParallelDynamicStitch"), _dynamic_stitch),
    "InvertPermutation": lambda attr, inputs: np.argsort(inputs[0].astype(np.int64)),
    "Reshape": lambda attr, inputs: inputs[0].reshape(inputs[1]),
    "Squeeze": _squeeze,
    "ExpandDims": lambda attr, inputs: np.expand_dims(inputs[0], int(inputs[1])),
    "Tile": _tile,
    "Fill": _fill,
    "Range": _range,
    "Cast": lambda attr, inputs: inputs[0],
    **{op: _elementwise(function) for op, function in _BINARY.items()},
    **{op: _reduction(*how) for op, how in _REDUCTIONS.items()},
    "Neg": lambda attr, inputs: -inputs[0],
}


def by_kernel(n: Op) -> Values | None:
    """Return the contents that the kernel of an op computes; None where an operand is not known or does not fit."""
    known = [array(n, i) for i in range(len(n.inputs))]
    try:
        made = None if any(one is None for one in known) else KERNELS[n.op](n.attr, known)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # TensorFlow reports it at run time
        return None
    return None if made is None else (flat(made),)
