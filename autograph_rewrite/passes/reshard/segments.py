"""Slice a replicated value into blocks with segments, and gather such blocks in the original's row order.

    whole   a0 a1 a2 b0 b1 b2                  slices: rows 0 to 2 and 3 to 5 | rows 2 to 3 and 5 to 6
    joined  a0 a1 b0 b1 | a2 b2                rows 0 1 4 2 3 5 of it are the whole

Where a segment of a block begins follows from the lengths of all blocks, so an uneven batch needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from autograph_rewrite.ir.graph import Span, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.collectives.block_bounds import SCOPE, Blocks
from autograph_rewrite.passes.collectives.rows import rows_at, rows_between


def in_order(context: Context, joined: Value, parts: Sequence[int], dim: int, blocks: Blocks) -> Value:
    """Put the rows of joined blocks in the order of the whole.

    Args:
        context: the rewrite.
        joined: all blocks, one behind the other.
        parts: how many rows of each segment one example has.
        dim: along which they are joined.
        blocks: of the batch.
    """
    where = blocks.ordered(tuple(parts), lambda: _order(context, parts, blocks))
    return rows_at(context, joined, where, dim, "in_order", joined.node.span)


def _order(context: Context, parts: Sequence[int], blocks: Blocks) -> Value:
    """Return where each row of the whole stands among the joined blocks (vector, runs once)."""
    count, name = context.replicas, f"{SCOPE}/segments_{'_'.join(map(str, parts))}"
    before = [0, *accumulate(parts)]
    starts, sizes = np.zeros((len(parts) * count, count), np.int32), np.zeros((len(parts) * count, count), np.int32)
    for i, rows in enumerate(parts):
        for r in range(count):
            starts[i * count + r, :r] = before[-1]
            starts[i * count + r, r] = before[i]
            sizes[i * count + r, r] = rows

    build = Builder.of(context, blocks.source, name, span=Span.ONCE)

    def const(content: object, what: str) -> Value:
        made = build.numbers(content, what)
        made.node.set_span(Span.ONCE)
        return made

    def of_lengths(matrix: object, what: str) -> Value:
        products = build.op("Mul", const(matrix, f"{what}_of_block"), blocks.lengths, what=f"{what}_terms")
        return build.op("Sum", products, const([1], f"{what}_axis"), what=what, keep_dims=True)

    first, size = of_lengths(starts, "first"), of_lengths(sizes, "size")
    zero, one = const(0, "zero"), const(1, "one")
    longest = build.op("Max", size, const([0, 1], "axes"), what="longest")
    places = build.op("Range", zero, longest, one, what="places")
    numbers = build.op("AddV2", first, places, what="rows")
    there = build.op("Where", build.op("Less", places, size, what="is_there"), what="there")
    return build.op("GatherNd", numbers, there, what="order", Tindices=dtypes.INT64)


def piece_with_segments(context: Context, whole: Value, parts: Sequence[int], dim: int, blocks: Blocks) -> Value:
    """Cut each replica's block of each part out of a whole value.

    Args:
        context: the rewrite.
        whole: the replicated value.
        parts: rows per example of each segment, in order.
        dim: the dimension that is split.
        blocks: limits of the replicas' blocks.
    """
    name, cut = whole.node.name, []
    for before, rows in zip([0, *accumulate(parts)], parts, strict=False):
        limits = [blocks.rows(what, rows) for what in ("begin", "end")]
        if before:
            limits = [_behind(context, limit, blocks.rows("batch", before)) for limit in limits]
        cut.append(rows_between(context, whole, name, dim, (limits[0], limits[1])))
    build = Builder.of(context, whole, span=Span.EACH)
    return build.op("ConcatV2", *cut, build.numbers(dim, "segments_axis"), what="segments", N=len(cut))


def _behind(context: Context, limit: Value, rows: Value) -> Value:
    return Builder.of(context, limit, span=Span.EACH).op("AddV2", limit, rows, what="behind")
