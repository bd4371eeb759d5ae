"""The work of one instance of an op: its family, FLOPs, bytes read and bytes written.

Contractions are counted from shapes. Everything else is counted by the elements that it touches, a few operations for
each. Views (Identity, Reshape, reads of variables) do nothing: their output is their input's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.shapes.recorded import constant
from autograph_rewrite.ir.variable_ops import is_handle, updates_rows
from autograph_rewrite.ops.facts.concrete_sizes import Shape
from autograph_rewrite.ops.rules.registered import FAMILY as REGISTERED
from autograph_rewrite.ops.rules.table import families, rule_of
from autograph_rewrite.ops.traits import has

ROW_BYTES = 512
"""Fetching a row of a table that no cache holds takes as long as reading so many bytes in sequence: 0.1 us."""
_OF_RULE = {
    **dict.fromkeys(families("reduce", "pooling", "segment"), "reduce"),
    **dict.fromkeys(families("gather_scatter", "slicing"), "gather"),
    **dict.fromkeys(families("random"), "random"),
}
_COUNTED = {**dict.fromkeys(families("convolutions"), "conv"), REGISTERED: "elementwise"}
"""What work that a rule states counts as; products where nothing stands here."""


class Work(NamedTuple):
    """What one instance does.

    Attributes:
        family: of `machine.FAMILIES`.
        flops: its arithmetic.
        nbytes: what it reads and writes.
    """

    family: str
    flops: float
    nbytes: float


NOTHING = Work("elementwise", 0.0, 0.0)


def is_view(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> bool:
    """Return whether a node aliases the memory of its first input.

    So do a transposition that changes nothing, and a sum over no axis: TensorFlow sees that before it copies.

    Args:
        node: the op.
        inputs: shapes of its operands, in numbers.
        outputs: and of its results.
    """
    if has(node.op, "views"):
        return True
    if node.op == "Transpose" and len(node.inputs) == 2:
        order = constant(node.inputs[1])
        return order is not None and order.tolist() == list(range(order.size))
    return has(node.op, "reduces") and bool(outputs) and inputs[:1] == outputs[:1] and 1 not in outputs[0]


def work_of(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape], nbytes: float) -> Work:
    """Return what one instance of a node does.

    Args:
        node: the op and its attributes.
        inputs: the shapes that one instance reads.
        outputs: the shapes that it makes.
        nbytes: of all of them together.
    """
    if has(node.op, "free") or is_view(node, inputs, outputs):
        return NOTHING
    rule = rule_of(node.op)
    if rule is not None and rule.work is not None:
        try:
            return Work(_COUNTED.get(rule.family, "matmul"), rule.work(node.attr, inputs, outputs), nbytes)
        except (IndexError, ValueError):
            pass  # of a shape that was not known, so it counts by elements
    if updates_rows(node):
        return _rows_updated(node, inputs)
    elements = max((math.prod(shape) for shape in (*inputs, *outputs)), default=0)
    if has(node.op, "transcendental"):
        return Work("transcendental", elements * 2.0, nbytes)
    family = _OF_RULE.get(rule.family, "elementwise") if rule is not None else "elementwise"
    if family == "gather":  # rows that are not looked up are not read
        elements = sum(math.prod(shape) for shape in outputs)
        nbytes = min(nbytes, 12.0 * elements)
        if node.op == "ResourceGather" and outputs and math.prod(inputs[0]) > math.prod(outputs[0]):
            nbytes += _row_bytes(outputs[0], math.prod(inputs[1]))
    return Work(family, float(elements), nbytes)


def _rows_updated(node: Node, inputs: Sequence[Shape]) -> Work:
    """Return the work of an update of some rows: of the table and of each slot, all are read and written."""
    _, rows = rows_given(node, inputs)
    tables = sum(map(is_handle, node.inputs))
    count = rows[0] if rows else 1
    nbytes = 2.0 * tables * (4.0 * math.prod(rows) + _row_bytes(rows, count))
    return Work("elementwise", 2.0 * tables * math.prod(rows), nbytes)


def rows_given(node: Node, inputs: Sequence[Shape]) -> tuple[Value, Shape]:
    """Return the rows that an update of some rows is given, the largest of its operands, and their shape."""
    given = [(value, shape) for value, shape in zip(node.inputs, inputs, strict=True) if not is_handle(value)]
    return max(given, key=lambda one: math.prod(one[1]))


def _row_bytes(shape: Shape, count: int) -> float:
    """Return the bytes that could be read in sequence while so many rows, in one shape together, are fetched."""
    return float(count) * max(0.0, ROW_BYTES - 4.0 * math.prod(shape) / max(count, 1))
