"""The shapes of the outputs of one op from those of its inputs, for the ops that gradients are made of.

    MatMul([?,4], [4,3])  ──►  [?,3]        Reshape(x, [2,-1])  ──►  [2,?]

A rule that cannot tell returns None. `ir.shapes.inference` asks the rules in order, and gives names to what stays
unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ops.traits import has, operands, ops_with

Dim = int | str
Shape = tuple[Dim, ...] | str
"""A dimension is a number, or the name of an unknown one; a name alone stands for an unknown rank."""
Rule = Callable[[Node, int, Sequence[Shape]], Shape | None]
"""Returns the shape of one output from those of the inputs; None where it cannot tell."""


def unknown(value: Value) -> str:
    """Return the name of a shape that nothing tells."""
    return f"{value.node.op} {common_name(value.name)}"


def constant(value: Value) -> Any:
    """Return the array that a value always is, None where it is not a Const."""
    node = value.node
    while node.op in ("Identity", "Enter") and node.inputs:
        node = node.inputs[0].node
    if node.op != "Const":
        return None
    found = node.attr("value")
    return found if isinstance(found, np.ndarray | np.generic) else None


def shape_operand(node: Node) -> Value | None:
    """Return the operand that spells out the shape of the result."""
    return next((node.inputs[index] for index in operands(node.op, "shaped_by") if index < len(node.inputs)), None)


def _stated(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    """Return the shape in an attribute."""
    return _named(node, index, node.attr("shape"))


def _named(node: Node, index: int, shape: Any) -> Shape | None:
    if shape is None:
        return None
    name = common_name(node.output(index).name)
    return tuple(f"{name}.{i}" if dim is None else dim for i, dim in enumerate(shape))


def _const(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    found = node.attr("value")
    if isinstance(found, np.ndarray | np.generic):
        return tuple(found.shape)
    return tuple(dim.size for dim in found.tensor_shape.dim)  # a type without a simple numpy form


def _variable(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    handle = handle_node(node.inputs[0])
    return _named(node, index, handle.attr("shape")) if handle.op == "VarHandleOp" else None


def _first(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    return given[0]


def _scalar(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    return ()


def _merge(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    if index:
        return ()
    return given[0] if given[0] and all(one == given[0] for one in given) else None


def _broadcast(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    result = given[0]
    for other in given[1:]:
        if other == result or other == ():
            continue
        if result == ():
            result = other
            continue
        if isinstance(result, str) or isinstance(other, str):
            return None
        pairs = [*zip_longest(reversed(result), reversed(other), fillvalue=1)]
        result = tuple(_wider(node, len(pairs) - i, a, b) for i, (a, b) in enumerate(pairs))[::-1]
    return result


def _wider(node: Node, place: int, a: Dim, b: Dim) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    known = [dim for dim in (a, b) if isinstance(dim, int)]
    return known[0] if known else f"{unknown(node.output())}.{place}"


def _matmul(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    left, right = given[0], given[1]
    outer = _dims(left)[:-2]
    if node.op != "MatMul" and (isinstance(left, str) or outer != _dims(right)[:-2]):
        return None
    turned_left = node.attr("transpose_a") or node.attr("adj_x")
    turned_right = node.attr("transpose_b") or node.attr("adj_y")
    name = unknown(node.output())
    rows = f"{name}.rows" if isinstance(left, str) else left[-1 if turned_left else -2]
    columns = f"{name}.columns" if isinstance(right, str) else right[-2 if turned_right else -1]
    return (*outer, rows, columns)


def _reduce(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    axes = constant(node.inputs[1])
    if axes is None or isinstance(given[0], str):
        return None
    gone = {int(axis) % len(given[0]) for axis in np.ravel(axes)} if given[0] else set()
    kept = bool(node.attr("keep_dims"))
    return tuple(1 if i in gone else dim for i, dim in enumerate(given[0]) if kept or i not in gone)


def _argument(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    axis = constant(node.inputs[1])
    if axis is None or isinstance(given[0], str):
        return None
    return tuple(dim for i, dim in enumerate(given[0]) if i != int(axis) % len(given[0]))


def _shaped(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    """Return what an operand says: a constant, one -1 in which is worked out."""
    operand = shape_operand(node)
    if operand is None or has(operand.node.op, "shapes"):
        return given[-1]
    wanted = constant(operand)
    if wanted is None:
        return None
    dims: list[Dim] = [int(dim) for dim in np.ravel(wanted)]
    if -1 in dims:
        dims[dims.index(-1)] = _quotient(given[0], _count(dim for dim in dims if dim != -1))
    return tuple(dims)


def _quotient(shape: Shape, parts: int) -> Dim:
    """Return the number of elements of a part, of `parts` that make up a whole of this shape."""
    if isinstance(shape, tuple) and all(isinstance(dim, int) for dim in shape) and parts:
        return _count(shape) // parts
    return f"{shape} in {parts} parts"


def _count(dims: Iterable[Dim]) -> int:
    return math.prod(dim for dim in dims if isinstance(dim, int))


def _concat(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    axis, parts = constant(node.inputs[-1]), given[:-1]
    if axis is None or any(isinstance(part, str) for part in parts):
        return None
    at = int(axis) % len(parts[0])
    along = [part[at] for part in parts]
    total: Dim = f"{unknown(node.output())}.{at}"
    if all(isinstance(dim, int) for dim in along):
        total = sum(dim for dim in along if isinstance(dim, int))
    return (*_dims(parts[0][:at]), total, *_dims(parts[0][at + 1 :]))


def _dims(shape: Shape) -> tuple[Dim, ...]:
    return shape if isinstance(shape, tuple) else ()


def _pack(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    if isinstance(given[0], str):
        return None
    at = int(node.attr("axis")) % (len(given[0]) + 1)
    return (*given[0][:at], len(given), *given[0][at:])


def _expand(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    axis = constant(node.inputs[1])
    if axis is None or isinstance(given[0], str):
        return None
    at = int(np.ravel(axis)[0]) % (len(given[0]) + 1)
    return (*given[0][:at], 1, *given[0][at:])


def _transpose(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    order = constant(node.inputs[1])
    return None if order is None else tuple(given[0][int(i)] for i in np.ravel(order)) if given[0] else ()


def _pad(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    more = constant(node.inputs[1])
    if isinstance(given[0], str):
        return None
    if more is None:
        return tuple(f"{unknown(node.output())}.{i}" for i in range(len(given[0])))
    return tuple(
        dim + int(sum(ends)) if isinstance(dim, int) else dim if not any(ends) else f"{unknown(node.output())}.{i}"
        for i, (dim, ends) in enumerate(zip(given[0], more, strict=True))
    )


def _slice(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    sizes = constant(node.inputs[2])
    if sizes is None or isinstance(given[0], str):
        return None
    return tuple(f"{unknown(node.output())}.{i}" if size == -1 else int(size) for i, size in enumerate(np.ravel(sizes)))


def _strided(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    begin, end, step = (constant(value) for value in node.inputs[1:])
    if step is None or isinstance(given[0], str) or node.attr("ellipsis_mask") or node.attr("new_axis_mask"):
        return None
    masks = [node.attr(key) or 0 for key in ("begin_mask", "end_mask", "shrink_axis_mask")]
    dims: list[Dim] = []
    for i, dim in enumerate(given[0]):
        open_begin, open_end, shrink = (mask >> i & 1 for mask in masks)
        known = (open_begin or begin is not None) and (open_end or end is not None) and isinstance(dim, int)
        if i >= len(step) or (open_begin and open_end and step[i] == 1 and not shrink):
            dims.append(dim)
        elif not shrink and known:
            limits = (None if open_begin else int(begin[i]), None if open_end else int(end[i]), int(step[i]))
            dims.append(len(range(*slice(*limits).indices(int(dim)))))
        elif not shrink:
            dims.append(f"{unknown(node.output())}.{i}")
    return tuple(dims)


def _squeeze(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    axes = node.attr("squeeze_dims") or ()
    if isinstance(given[0], str) or (not axes and any(isinstance(dim, str) for dim in given[0])):
        return None
    gone = {axis % len(given[0]) for axis in axes} if axes else {i for i, dim in enumerate(given[0]) if dim == 1}
    return tuple(dim for i, dim in enumerate(given[0]) if i not in gone)


def _unpack(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    if isinstance(given[0], str):
        return None
    at = int(node.attr("axis")) % len(given[0])
    return (*given[0][:at], *given[0][at + 1 :])


def _second(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    return given[1]


def _convolved(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    if isinstance(given[0], str) or isinstance(given[1], str) or node.attr("data_format") != b"NHWC":
        return None
    name = unknown(node.output())
    return (given[0][0], *(f"{name}.{i}" for i in range(1, len(given[0]) - 1)), given[1][-1])


def _sized(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    """Return the rank of the input, as the length of its shape."""
    return None if isinstance(given[index], str) else (len(given[index]),)


def _last(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    """Return the channels, which stand last, or second."""
    if isinstance(given[0], str):
        return None
    return (given[0][1 if node.attr("data_format") == b"NCHW" else -1],)


def _gather(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    params = given[0] if node.op == "GatherV2" else _variable(node, index, given)
    axis = constant(node.inputs[2]) if node.op == "GatherV2" else 0
    if axis is None or params is None or isinstance(params, str) or isinstance(given[1], str):
        return None
    if node.attr("batch_dims"):
        return None
    at = int(axis) % len(params)
    return (*params[:at], *given[1], *params[at + 1 :])


def _segments(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    count = constant(node.inputs[2])
    if isinstance(given[0], str) or isinstance(given[1], str):
        return None
    rows: Dim = f"{unknown(node.output())}.0" if count is None else int(count)
    return (rows, *given[0][len(given[1]) :])


def _gathered(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    size = constant(node.inputs[1])
    if isinstance(given[0], str) or not given[0]:
        return None
    rows = given[0][0]
    together = rows * int(size) if isinstance(rows, int) and size is not None else f"{unknown(node.output())}.0"
    return (together, *given[0][1:])


def _losses(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    return given[0] if index or isinstance(given[0], str) else given[0][:-1]


def _cut(node: Node, index: int, given: Sequence[Shape]) -> Shape | None:
    """Return the shape of one of the pieces that SplitV makes."""
    shape, sizes, axis = given[0], constant(node.inputs[1]), constant(node.inputs[2])
    if isinstance(shape, str) or sizes is None or axis is None or sizes[index] < 0:
        return None
    at = int(axis) % len(shape)
    return (*shape[:at], int(sizes[index]), *shape[at + 1 :])


RULES: dict[str, Rule] = {
    **dict.fromkeys(ops_with("shape_of_first"), _first),
    **dict.fromkeys(ops_with("shape_of_broadcast"), _broadcast),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"), _reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), _argument),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2"), _matmul),
    **dict.fromkeys(("Size", "L2Loss", "Rank", "LoopCond"), _scalar),
    **dict.fromkeys(("Shape", "ShapeN"), _sized),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    **dict.fromkeys(("Merge", "RefMerge"), _merge),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gather),
    **dict.fromkeys(("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"), _losses),
    **dict.fromkeys(("Placeholder", "VariableV2", "Variable"), _stated),
    **dict.fromkeys(ops_with("shaped_by"), _shaped),
    "Const": _const,
    "ReadVariableOp": _variable,
    "Conv2D": _convolved,
    "ConcatV2": _concat,
    "Pack": _pack,
    "ExpandDims": _expand,
    "Transpose": _transpose,
    "Slice": _slice,
    "StridedSlice": _strided,
    "Squeeze": _squeeze,
    "Unpack": _unpack,
    "SplitV": _cut,
    "Select": _second,
    "BiasAddGrad": _last,
    "UnsortedSegmentSum": _segments,
    "CollectiveGatherV2": _gathered,
}
