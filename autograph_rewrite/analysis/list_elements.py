"""Find what lists and arrays of tensors will hold: for an empty list, only later writes tell."""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import ANY


def future_splits(state: Propagation) -> dict[Value, int]:
    """Return the empty lists that will hold blocks, and values that forward them, with the dimension that is cut."""
    empty = [value for value, fact in state.facts.items() if fact.dtype == dtypes.VARIANT and fact.placement == ANY]
    found: dict[Value, int] = {}
    changed = bool(empty)
    while changed:
        changed = False
        for value in reversed(empty):
            dim = None if value in found else _follow(state, value, found)
            if dim is not None:
                found[value] = dim
                changed = True
    return found


def _follow(state: Propagation, value: Value, found: dict[Value, int]) -> int | None:
    for node, _ in value._uses:
        transferred = state.transfers.get(node)
        for index, fact in enumerate(transferred.outputs if transferred is not None else ()):
            if fact.dtype != dtypes.VARIANT:
                continue
            if fact.placement.is_split:
                return fact.placement.dim
            if node.output(index) in found:
                return found[node.output(index)]
    return None


# Arrays state the shapes of their elements in an attribute.

SHAPES_OF_ELEMENTS = {
    "TensorArrayV3": ("element_shape", 0),
    "TensorArrayGatherV3": ("element_shape", 0),
    "TensorArrayConcatV3": ("element_shape_except0", 1),
}
"""The attribute, and how many leading dimensions of an element it leaves out."""


def split_dimension(state: Propagation, node: Node) -> int | None:
    """Return the dimension along which the elements of an array are cut."""
    handle = node.output() if node.op == "TensorArrayV3" else node.inputs[0]
    content = state.cells.get(state.facts[handle].cell)
    return content.placement.dim if content is not None and content.placement.is_split else None
