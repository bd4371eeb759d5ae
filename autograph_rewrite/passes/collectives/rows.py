"""Rows of a value: those that a vector names, or those between two limits."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.mesh import EACH, Span
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite


def rows_at(rewrite: Rewrite, value: Value, which: Value, dim: int, what: str, span: Span) -> Value:
    """Return the rows of a value that a vector of numbers says, along dimension `dim`.

    Args:
        value: of any shape.
        which: [n] numbers of rows, made outside of loops.
        what: the name of the new node, behind the value's.
        span: how often it runs.
    """
    build = FoldedBuilder.of(rewrite, value, span=span)
    axis = build.numbers(dim, f"{what}_axis")
    return build.op("GatherV2", value, which, axis, what=what)


def rows_between(rewrite: Rewrite, source: Value, name: str, dim: int, limits: tuple[Value, Value]) -> Value:
    """Return the rows of a value between two limits of each block, along dimension `dim`.

    Args:
        source: of any shape.
        name: prefix of the names of new nodes.
        limits: scalars: the first row, and the one behind the last.
    """
    build = FoldedBuilder.of(rewrite, source, name, span=EACH)

    def vector(scalar: Value, what: str) -> Value:
        position = np.zeros(dim + 1, np.int32)
        position[dim] = 1
        at = build.numbers(position, f"{what}_at")
        return build.op("Mul", scalar, at, what=what)

    begin, end = vector(limits[0], "begin"), vector(limits[1], "end")
    step, before = build.numbers(np.ones(dim + 1, np.int32), "step"), (1 << dim) - 1
    return build.op("StridedSlice", source, begin, end, step, what="block", begin_mask=before, end_mask=before)
