"""Blocks: where each replica's part of the batch begins and ends, computed once per step.

    B = shape(x)[0]      replica r holds examples  r*(B//N) + min(r, B%N)  ...  the same for r+1

The first B mod N replicas hold one example more. A batch of static size gives constants.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Span, Value
from autograph_rewrite.passes.context import Context

SCOPE = "autograph_batch"


def bounds(batch: int, replicas: int) -> list[int]:
    """Return the `replicas + 1` limits of the blocks of a batch."""
    size, extra = divmod(batch, replicas)
    return [r * size + min(r, extra) for r in range(replicas + 1)]


class Blocks:
    """Scalar int32 values about the batch, for all who need them.

    Args:
        context: the rewrite.
        source: the whole batch input that is measured.
        axis: its batch dimension.
    """

    def __init__(self, context: Context, source: Value, axis: int) -> None:
        self._context = context
        self.source = source
        self._axis = axis
        self._scaled: dict[tuple[str, int], Value] = {}

    @property
    def static(self) -> int | None:
        """The batch size where it is known."""
        return self._context.state.semantics.batch

    @cached_property
    def batch(self) -> Value:
        """The number of examples of the whole batch (scalar, runs once)."""
        context, source = self._context, self.source
        if self.static is not None:
            return self._const("size", self.static)
        shape = context.add("Shape", [source], name=f"{SCOPE}/shape", span=Span.ONCE, origin=source.node)
        limits = [
            self._vector(f"{SCOPE}/{n}", v) for n, v in (("axis", self._axis), ("next", self._axis + 1), ("one", 1))
        ]
        size = context.add(
            "StridedSlice",
            [shape.output(), *limits],
            name=f"{SCOPE}/size",
            span=Span.ONCE,
            origin=source.node,
            attrs={"shrink_axis_mask": 1},
        )
        return size.output()

    def _vector(self, name: str, entry: int) -> Value:
        node = self._context.graph.add(
            "Const",
            name=name,
            attrs={"value": np.array([entry], np.int32), "dtype": dtypes.INT32},
            origin=self.source.node,
        )
        return node.output()

    def _const(self, name: str, entry: int) -> Value:
        return self._context.const(entry, np.int32, name=f"{SCOPE}/{name}", near=self.source)

    def _each(self, name: str, entries: list[int]) -> Value:
        return self._context.const_each(entries, np.int32, name=f"{SCOPE}/{name}", near=self.source)

    def _limit(self, name: str, offset: int) -> Value:
        """Return r -> start of block r + offset."""
        context, replicas = self._context, self._context.replicas
        if self.static is not None:
            limits = bounds(self.static, replicas)
            return self._each(name, limits[offset : offset + replicas])
        index = self._each(f"{name}_index", list(range(offset, replicas + offset)))

        def step(op: str, a: Value, b: Value, what: str) -> Value:
            node = context.add(op, [a, b], name=f"{SCOPE}/{name}_{what}", span=Span.EACH, origin=self.source.node)
            return node.output()

        whole = step("Mul", index, self._quotient, "whole")
        extra = step("Minimum", index, self._remainder, "extra")
        return step("AddV2", whole, extra, "limit")

    def _once(self, op: str, name: str) -> Value:
        count = self._const(f"{name}_replicas", self._context.replicas)
        node = self._context.add(
            op, [self.batch, count], name=f"{SCOPE}/{name}", span=Span.ONCE, origin=self.source.node
        )
        return node.output()

    @cached_property
    def _quotient(self) -> Value:
        return self._once("FloorDiv", "quotient")

    @cached_property
    def _remainder(self) -> Value:
        return self._once("FloorMod", "remainder")

    @cached_property
    def begin(self) -> Value:
        """The first example of this replica's block (scalar, each)."""
        return self._limit("begin", 0)

    @cached_property
    def end(self) -> Value:
        """The example after this replica's block (scalar, each)."""
        return self._limit("end", 1)

    @cached_property
    def count(self) -> Value:
        """The number of examples in this replica's block (scalar, each)."""
        if self.static is not None:
            limits = bounds(self.static, self._context.replicas)
            return self._each("count", [b - a for a, b in pairwise(limits)])
        node = self._context.add(
            "Sub", [self.end, self.begin], name=f"{SCOPE}/count", span=Span.EACH, origin=self.source.node
        )
        return node.output()

    def rows(self, what: str, per_example: int) -> Value:
        """Return `begin`, `end`, `count` or `batch` in rows, where one example covers `per_example` of them."""
        value: Value = getattr(self, what)
        if per_example == 1:
            return value
        key = (what, per_example)
        if key not in self._scaled:
            factor = self._const(f"{what}_unit", per_example)
            node = self._context.add(
                "Mul", [value, factor], name=f"{SCOPE}/{what}_rows", span=value.node.span, origin=self.source.node
            )
            self._scaled[key] = node.output()
        return self._scaled[key]
