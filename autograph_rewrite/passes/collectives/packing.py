"""Several values of fixed shapes as one vector, and back: Concat(flat %a, flat %b) ... SplitV ──► a, b.

Vectors of other passes may stand behind them, which are given back as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.resolve.compression import static_shape


class Packing:
    """How some values lie in one vector; one value alone stays as it is.

    Args:
        values: original ones, of fixed shapes, for which others are packed.
        name: prefix of the names of new nodes.
        behind: how many numbers each vector has that stands behind them.
    """

    def __init__(self, rewrite: Rewrite, values: Sequence[Value], name: str, behind: Sequence[int] = ()) -> None:
        self._rewrite, self._values, self._name = rewrite, values, name
        self.shapes = [*(static_shape(rewrite.fact(value)) for value in values), *((length,) for length in behind)]
        if len(self.shapes) > 1:
            self._line = rewrite.const([-1], np.int32, name=f"{name}/line", near=values[0])
            self._axis = rewrite.const(0, np.int32, name=f"{name}/axis", near=values[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is packed."""
        return self.shapes[0] if len(self.shapes) == 1 else (sum(map(math.prod, self.shapes)),)

    def join(self, parts: Sequence[Value]) -> Value:
        """Return values of these shapes, which run alike, as one."""
        if len(parts) == 1:
            return parts[0]
        flat = [self._builder(part, part).op("Reshape", part, self._line, what="flat") for part in parts]
        build = self._builder(parts[0], self._values[0])
        return build.op("ConcatV2", *flat, self._axis, what="concat", N=len(flat))

    def split(self, joined: Value, like: Value) -> list[Value]:
        """Return the parts of what was joined, in their shapes.

        Args:
            joined: all elements, in order.
            like: a value that runs as often.
        """
        whole = [joined]
        if len(self.shapes) > 1:
            build = self._builder(like, self._values[0])
            sizes = build.numbers([math.prod(shape) for shape in self.shapes], "sizes")
            parts = build.op("SplitV", joined, sizes, self._axis, what="split", num_split=len(self.shapes)).node
            whole = [parts.output(i) for i in range(len(self.shapes))]
        count = len(self._values)
        values = zip(whole[:count], self._values, self.shapes[:count], strict=True)
        return [*(self._shaped(*one, like) for one in values), *whole[count:]]

    def _shaped(self, part: Value, value: Value, shape: Sequence[int], like: Value) -> Value:
        operand = self._rewrite.const(list(shape), np.int32, name=f"{value.node.name}/shape", near=value)
        return self._builder(like, value).op("Reshape", part, operand, what="whole")

    def _builder(self, like: Value, origin: Value) -> FoldedBuilder:
        return FoldedBuilder.of(self._rewrite, self._values[0], self._name, span=like.node.span, origin=origin.node)
