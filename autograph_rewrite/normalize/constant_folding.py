"""Fold integer arithmetic on constants, so that shapes become Consts that rules can read.

Only integers, only up to 64 elements, only exact. A folded node keeps its name and its control edges, and inherits
those of its constants: they are what ties it to a loop or a branch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.control_flow import OPENS
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.shapes.recorded import static_shape
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.replica_marks import VARYING
from autograph_rewrite.ops.traits import has

MAX_ELEMENTS = 64


def fold(graph: Graph, batches: Sequence[Value]) -> None:
    """Replace what can be computed now by constants, in place.

    Args:
        graph: the graph.
        batches: the batch inputs; the shape of whatever depends on them stays an op, because a replica's part has
            another shape, even when the whole batch's is static.
    """
    pending = deque(node for node in graph if node.op in EVALUATE)
    pending.extend(_fold_shapes(graph, batches))
    while pending:
        node = pending.popleft()
        if node.op not in EVALUATE:
            continue
        value = _evaluate(node)
        if value is not None:
            pending.extend(_to_constant(node, value))


def _evaluate(node: Node) -> Array | None:
    """Return what a node gives, or None when that is not known now."""
    if VARYING in node.attrs or any(value.node.op != "Const" for value in node.inputs):
        return None
    if len(node.output_dtypes) != 1 or node.output_dtypes[0] not in dtypes.INTEGER:
        return None
    arguments = []
    for value in node.inputs:
        if value.dtype not in dtypes.INTEGER:
            return None
        constant = value.node.attr("value")
        if not isinstance(constant, np.ndarray) or constant.size > MAX_ELEMENTS:
            return None
        arguments.append(constant if constant.dtype == np.uint64 else constant.astype(np.int64))
    try:
        with np.errstate(all="raise"):
            result = EVALUATE[node.op](node, arguments)
    except (ArithmeticError, ValueError, IndexError, TypeError):
        return None  # whatever is wrong with it, TensorFlow will say so when it runs
    if result is None:
        return None
    array = np.asarray(result)
    if array.size > MAX_ELEMENTS or array.dtype.kind not in "iu":
        return None
    typed = array.astype(dtypes.numpy_dtype(node.output_dtypes[0]))
    return typed if np.array_equal(typed, array) else None  # an overflow stays TensorFlow's


def _fold_shapes(graph: Graph, batches: Sequence[Value]) -> list[Node]:
    """Replace the static shapes of what depends on no batch and stands in no loop or branch."""
    known = [(node, value) for node in graph if has(node.op, "folds_to_size") and (value := _known(node)) is not None]
    if not known:
        return []
    moving = descendants((value.node for value in batches), controls=False)
    moving |= descendants(node for node in graph if node.op in OPENS)
    users: list[Node] = []
    for node, value in known:
        if node not in moving:
            users += _to_constant(node, value)
    return users


def _known(node: Node) -> Array | None:
    source = node.inputs[0]
    shape = source.node.attr("shape") if node.op == "VariableShape" else static_shape(source)
    if node.op == "VariableShape" and source.node.op != "VarHandleOp":
        return None
    if shape is None:
        return None
    dtype: Any = dtypes.numpy_dtype(node.output_dtypes[0])
    if node.op == "Rank":
        return np.asarray(len(shape), dtype)
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        return None
    return np.asarray(math.prod(sizes) if node.op == "Size" else sizes, dtype)


def _to_constant(node: Node, value: Array) -> list[Node]:
    """Turn a node into a Const; return its readers, which may follow."""
    for source in node.inputs:
        for control in source.node.controls if source.node.op == "Const" else ():
            node.add_control(control)
    become(node, "Const", (), {"dtype": node.output_dtypes[0], "value": value})
    return [use.node for use in node.output().uses]


# Numpy kernels of integer ops for constant folding: one small function per op type, in one table.


Array = np.ndarray[Any, Any]
Evaluate = Callable[[Node, Sequence[Array]], Any]

LONGEST = 64


def _elementwise(function: Callable[..., Any]) -> Evaluate:
    return lambda node, inputs: function(*inputs)


def _reduction(function: Callable[..., Any]) -> Evaluate:
    def evaluate(node: Node, inputs: Sequence[Array]) -> Any:
        value, axes = inputs
        return function(value, axis=tuple(int(a) for a in axes.ravel()), keepdims=bool(node.attr("keep_dims")))

    return evaluate


def _truncated(divide: bool) -> Evaluate:
    def evaluate(node: Node, inputs: Sequence[Array]) -> Any:
        x, y = inputs
        quotient = np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))
        return quotient if divide else x - quotient * y

    return evaluate


def _strided_slice(node: Node, inputs: Sequence[Array]) -> Any:
    value, begin, end, strides = inputs
    masks = {key: int(node.attr(f"{key}_mask")) for key in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
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


def _slice(node: Node, inputs: Sequence[Array]) -> Any:
    value, begin, size = inputs
    return value[tuple(slice(int(b), None if s == -1 else int(b) + int(s)) for b, s in zip(begin, size, strict=True))]


def _gather(node: Node, inputs: Sequence[Array]) -> Any:
    value, indices = inputs[0], inputs[1]
    axis = int(inputs[2]) if len(inputs) > 2 else 0
    if node.attr("batch_dims", 0) or (indices < 0).any():
        return None
    return np.take(value, indices, axis=axis)


def _dynamic_stitch(node: Node, inputs: Sequence[Array]) -> Any:
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


def _inverse(node: Node, inputs: Sequence[Array]) -> Any:
    return np.argsort(inputs[0])


def _squeeze(node: Node, inputs: Sequence[Array]) -> Any:
    axes = node.attr("squeeze_dims", ())
    return np.squeeze(inputs[0], axis=tuple(axes) or None)


def _tile(node: Node, inputs: Sequence[Array]) -> Any:
    value, multiples = inputs
    if value.size * math.prod(int(i) for i in multiples) > LONGEST or len(multiples) != value.ndim:
        return None
    return np.tile(value, tuple(multiples))


def _fill(node: Node, inputs: Sequence[Array]) -> Any:
    shape = tuple(int(size) for size in inputs[0])
    return np.full(shape, inputs[1]) if math.prod(shape) <= LONGEST else None


def _range(node: Node, inputs: Sequence[Array]) -> Any:
    numbers = range(*(int(i) for i in inputs))
    return np.array(numbers, np.int64) if len(numbers) <= LONGEST else None


EVALUATE: Mapping[str, Evaluate] = {
    "Identity": lambda node, inputs: inputs[0],
    "Pack": lambda node, inputs: np.stack(inputs, axis=node.attr("axis")),
    "ConcatV2": lambda node, inputs: np.concatenate(inputs[:-1], axis=int(inputs[-1])),
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "GatherV2": _gather,
    "Gather": _gather,
    "DynamicStitch": _dynamic_stitch,
    "InvertPermutation": _inverse,
    "Reshape": lambda node, inputs: inputs[0].reshape(inputs[1]),
    "Squeeze": _squeeze,
    "ExpandDims": lambda node, inputs: np.expand_dims(inputs[0], int(inputs[1])),
    "Tile": _tile,
    "Fill": _fill,
    "Range": _range,
    "Cast": lambda node, inputs: inputs[0],
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
