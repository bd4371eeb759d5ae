"""Fold integer arithmetic on constants, so that shapes become Consts that rules can read.

Only integers, only up to 64 elements, only exact. A folded node keeps its name and its control edges, and inherits
those of its constants: they are what ties it to a loop or a branch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.control_flow import OPENS
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.shapes.recorded import static_shape
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.replica_marks import VARYING
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.ops.traits import has

MAX_ELEMENTS = 64
Array = np.ndarray[Any, Any]


def fold(graph: Graph, batches: Sequence[Value]) -> None:
    """Replace what can be computed now by constants, in place.

    Args:
        batches: the batch inputs; the shape of whatever depends on them stays an op, because a replica's part has
            another shape, even when the whole batch's is static.
    """
    pending = deque(node for node in graph if _kernel(node) is not None)
    pending.extend(_fold_shapes(graph, batches))
    while pending:
        node = pending.popleft()
        value = _evaluate(node)
        if value is not None:
            pending.extend(_to_constant(node, value))


def _kernel(node: Node) -> Callable[..., Any] | None:
    rule = TABLE.get(node.op)
    return rule.kernel if rule is not None else None


def _evaluate(node: Node) -> Array | None:
    """Return what a node gives, or None when that is not known now."""
    kernel = _kernel(node)
    if kernel is None or VARYING in node.attrs or any(value.node.op != "Const" for value in node.inputs):
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
            result = kernel(node.attr, arguments)
            if isinstance(result, np.ndarray) and result.dtype.kind == "O":
                result = result.astype(np.int64)
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
