"""Shape inference with symbolic dimensions, for graphs without shape annotations.

    x: Placeholder [?,4]       ('x.0', 4)        a dimension is a number, or the name of an unknown one
    Reshape(x, [-1,2])         ("('x.0', 4) in 2 parts", 2)
    py_func(x)                 'EagerPyFunc x'   a name alone where not even the rank is known

Two values with one shape here have one shape in every step, provided that what bears the same name in two graphs is
equally long in both. Names leave the replica out, so copies of a value have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.shapes.functions import RULES, Shape, shape_operand, unknown
from autograph_rewrite.ops.traits import BACK_EDGES, has


class Shapes:
    """The shapes of values of some graphs, worked out when they are asked for."""

    def __init__(self) -> None:
        self._known: dict[Value, Shape] = {}

    def __call__(self, value: Value) -> Shape:
        """Return the shape of a value."""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
                continue
            waiting = [one for one in _needed(top.node) if one not in self._known]
            if waiting:
                stack += waiting
            else:
                self._known[top] = self._infer(stack.pop())
        return self._known[value]

    def _infer(self, value: Value) -> Shape:
        node = value.node
        rule = RULES.get(node.op)
        found: Shape | None = None
        if rule is not None:
            try:
                found = rule(node, value.index, [self._known.get(one, "") for one in _sources(node)])
            except (ArithmeticError, GraphError, IndexError, TypeError, ValueError):  # broken, as others will say
                found = None
        return unknown(value) if found is None else found


def shape_text(shape: Shape) -> str:
    """Return `[3,?]`, or `[...]` where not even the rank is known."""
    if isinstance(shape, str):
        return "[...]"
    return f"[{','.join(str(dim) if isinstance(dim, int) else '?' for dim in shape)}]"


def differ(one: Shape, other: Shape) -> bool:
    """Tell whether two shapes are certainly not the same."""
    if isinstance(one, str) or isinstance(other, str):
        return False
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)


def _needed(node: Node) -> Sequence[Value]:
    """Return the values whose shapes the shape of a node follows from."""
    is_known = node.op in RULES and not has(node.op, "states_result_shape")
    if not is_known or any(value.node.op in BACK_EDGES for value in node.inputs):
        return ()
    return _sources(node)


def _sources(node: Node) -> list[Value]:
    """Return the inputs, and behind them the value whose shape the result is to have."""
    operand = shape_operand(node)
    if operand is None or not has(operand.node.op, "shapes"):
        return list(node.inputs)
    return [*node.inputs, operand.node.inputs[operand.index]]
