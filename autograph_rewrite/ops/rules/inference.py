"""Infers static shapes of a graph without annotations, with the rules that give the shapes of blocks.

    x: Placeholder [?,4]       (x.0, 4)        a dimension is a number, or the name of an unknown one
    Reshape(x, [-1,2])         (2*x.0, 2)
    py_func(x)                 'EagerPyFunc x' a text where not even the rank is known

Two values with one shape here have one shape in every step, provided that dimensions of one name are equally long in
all graphs. Names leave the replica out, so copies of a value have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import traced_back
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact, Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim, common_symbol, times
from autograph_rewrite.ops.rules.base import Op, Rule, Semantics, like_first, stated, whole
from autograph_rewrite.ops.rules.table import rule_of
from autograph_rewrite.ops.traits import BACK_EDGES, has, ops_with


def const_fact(node: Node) -> Fact:
    """Return the fact of a constant; small integers are tracked as sizes."""
    dtype = node.attr("dtype")
    content = node.attr("value")
    if not isinstance(content, np.ndarray):
        shape = content.tensor_shape
        return Fact(REPLICATED, dtype, tuple(dim.size for dim in shape.dim))
    value: tuple[Dim, ...] | None = None
    if dtype in (dtypes.INT32, dtypes.INT64) and content.size <= LARGEST_TRACKED:
        value = tuple(content.ravel().tolist())
    zero = bool(dtype in dtypes.INEXACT and content.size <= 4096 and not content.any())
    return Fact(REPLICATED, dtype, content.shape, value, zero)


LARGEST_TRACKED = 64


def _gathered(n: Op) -> tuple[Shape | None, ...]:
    """Return the rows of all members of a group, whose number is the second operand."""
    shape, size = n.shape(0), n.ints(1)
    return ((times(shape[0], size[0] if size else None), *shape[1:]),) if shape else (None,)


_OF_PASSES = {
    **dict.fromkeys(("CollectiveReduceV2", "CollectiveReduce", "CollectiveAllToAllV2"), Rule(whole, like_first)),
    "CollectiveGatherV2": Rule(whole, _gathered),
    **dict.fromkeys(("Variable", "VariableV2"), Rule(whole, stated)),
}
"""Rules of ops that are not divided: collectives of rewritten graphs, and legacy variables."""


_OF_HANDLES = frozenset(("Fill", "ExpandDims"))
"""Ops that make tensors of handles, which worker 0 sends to the others: their shape is not that of elements."""


class Shapes:
    """The shapes of values of some graphs, inferred on demand."""

    def __init__(self) -> None:
        self._facts: dict[Node, tuple[Fact, ...]] = {}

    def __call__(self, value: Value) -> Shape | str:
        """Return the shape of a value; where the rank is unknown, a text that copies of the value share."""
        stack = [value.node]
        while stack:
            waiting = [one.node for one in _needed(stack[-1]) if one.node not in self._facts]
            if waiting and stack[-1] not in self._facts:
                stack += waiting
            else:
                node = stack.pop()
                self._facts[node] = self._facts.get(node) or self._infer(node)
        fact = self._facts[value.node][value.index]
        holds = dtypes.base(fact.dtype) in (dtypes.RESOURCE, dtypes.VARIANT) and value.node.op not in _OF_HANDLES
        if fact.shape is not None and not holds:  # the fact of a container has the shape of its elements
            return fact.shape
        value = traced_back(value, ops_with("forwards"))  # a copy has the shape of its operand
        return f"{value.node.op} {common_name(value.name)}"

    def _infer(self, node: Node) -> tuple[Fact, ...]:
        if has(node.op, "constant"):
            return (const_fact(node),)
        types, rule = node.output_dtypes, _rule(node)
        unknown = (None,) * len(types)
        inputs = [self._facts[one.node][one.index] for one in _needed(node)]
        static = (node.attr("shape"),) if has(node.op, "states_shape") else unknown
        n = Op(node.op, node.attr, tuple(inputs), types, static, Semantics(), {})
        shapes: Sequence[Shape | None] = unknown
        values: Sequence[tuple[Dim, ...] | None] = unknown
        try:
            if rule is not None and len(inputs) == len(node.inputs):
                shapes = rule.shape(n) if rule.shape is not None else unknown
                values = (rule.value(n) if rule.value is not None else None) or unknown
        except (ArithmeticError, GraphError, LookupError, TypeError, ValueError):  # verifiers report broken nodes
            shapes = values = unknown
        return tuple(
            Fact(REPLICATED, dtype, _named(node, i, shape), value)
            for i, (dtype, shape, value) in enumerate(zip(types, shapes, values, strict=True))
        )


def _named(node: Node, index: int, shape: Shape | None) -> Shape | None:
    """Return a shape in which each open dimension has a name."""
    if shape is None:
        return None
    name = common_name(node.output(index).name)
    return tuple(common_symbol(f"{name}.{i}") if dim is None else dim for i, dim in enumerate(shape))


def _rule(node: Node) -> Rule | None:
    return _OF_PASSES.get(node.op) or rule_of(node.op)


def _needed(node: Node) -> Sequence[Value]:
    """Return the values that the shape of a node depends on; none for a node with a back edge or without a rule."""
    is_open = _rule(node) is None or any(value.node.op in BACK_EDGES for value in node.inputs)
    return () if is_open else node.inputs


def shape_text(shape: Shape | str) -> str:
    """Return `[3,?]`, or `[...]` where not even the rank is known."""
    if isinstance(shape, str):
        return "[...]"
    return f"[{','.join(str(dim) if isinstance(dim, int) else '?' for dim in shape)}]"


def differ(one: Shape | str, other: Shape | str) -> bool:
    """Return whether two shapes certainly differ."""
    if isinstance(one, str) or isinstance(other, str):
        return False
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
