"""Reads and writes static shapes that a graph records: in `_output_shapes`, or in an attribute that the op declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import traced_back
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ops.traits import has

Shape = tuple[int | None, ...]
"""Sizes of the dimensions of a tensor; None for an unknown size."""


def static_shape(value: Value) -> Shape | None:
    """Return the shape of a tensor; None for an unknown rank, or where nothing is recorded."""
    shapes = recorded_shapes(value.node)
    return shapes[value.index] if value.index < len(shapes) else None


def recorded_shapes(node: Node) -> Sequence[Shape | None]:
    """Return the shapes of the outputs of a node; none where nothing is recorded."""
    shapes = node.attr("_output_shapes")
    if shapes is None and has(node.op, "placeholders"):
        return (node.attr("shape"),)
    if shapes is None and has(node.op, "states_element_shapes"):
        shapes = node.attr("output_shapes")
    return shapes or ()


def record_shapes(node: Node, shapes: Sequence[Shape | None]) -> None:
    """Record the static shapes of a new node's outputs, as TensorFlow's exporter does."""
    node.set_raw_attr("_output_shapes", encode("list(shape)", shapes))


def constant(value: Value) -> Any:
    """Return the array of a constant, also through Identity and Enter; None where the value is no Const."""
    node = traced_back(value, ("Identity", "Enter")).node
    found = node.attr("value") if node.op == "Const" else None
    return found if isinstance(found, np.ndarray | np.generic) else None


def is_number(value: Value, number: float) -> bool:
    """Return whether a value is a constant with a single element, this number."""
    found = value.node.attr("value") if value.node.op == "Const" else None
    return isinstance(found, np.ndarray) and found.shape == () and np.array_equal(found, number, equal_nan=True)
