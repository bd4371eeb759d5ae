"""Integers among floating-point numbers: halves of 16 bits, which float32 holds, and adds zeros to, without rounding.

[size, digest...]  ──►  low halves, high halves, at this process's place among zeros  ── sum ──►  all rows
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder

BITS = 16


def split_row(build: Builder, row: Value, dtype: int, place: tuple[int, int]) -> Value:
    """Return a row of integers at its place among those of all members, as a vector of numbers.

    Args:
        build: adds nodes.
        row: int32 [k].
        dtype: a floating-point type.
        place: the number of this member, and how many there are.
    """
    mask, bits = build.numbers(2**BITS - 1, "mask"), build.numbers(BITS, "bits")
    low = build.op("BitwiseAnd", row, mask, what="low")
    high = build.op("BitwiseAnd", build.op("RightShift", row, bits, what="upper"), mask, what="high")
    both = build.op("ConcatV2", low, high, build.numbers(0, "axis"), what="halves", N=2)
    member, members = place
    own = np.zeros((members, 1), np.int32)
    own[member] = 1
    placed = build.op("Mul", both, build.numbers(own, "own"), what="placed")
    line = build.op("Reshape", placed, build.numbers([-1], "line"), what="flat")
    return build.op("Cast", line, what="exact", DstT=dtype)


def join_rows(build: Builder, total: Value, shape: tuple[int, int]) -> Value:
    """Return the rows that members made with `split_row`, given their sum (int32 matrix).

    Args:
        build: adds nodes.
        total: vector.
        shape: members, and integers of each.
    """
    members, count = shape
    exact = build.op("Cast", total, what="exact", DstT=dtypes.INT32)
    halves = build.op("Reshape", exact, build.numbers([members, 2, count], "shape"), what="halves")
    low = build.op("Unpack", halves, what="apart", num=2, axis=1)
    high = build.op("LeftShift", low.node.output(1), build.numbers(BITS, "bits"), what="high")
    return build.op("BitwiseOr", low, high, what="rows")
