"""Blocks with segments, made of a whole value and put together to one again, in the order of the original.

    whole   a0 a1 a2 b0 b1 b2                  slices: rows 0 to 2 and 3 to 5 | rows 2 to 3 and 5 to 6
    joined  a0 a1 b0 b1 | a2 b2                rows 0 1 4 2 3 5 of it are the whole

Where a segment of a block begins follows from the lengths of all blocks, so an uneven batch needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Span, Value
from autograph_rewrite.passes.blocks import SCOPE, Blocks
from autograph_rewrite.passes.combine import rows_at, rows_between
from autograph_rewrite.passes.context import Context


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

    def add(op: str, what: str, *inputs: Value, **attrs: object) -> Value:
        return context.add(
            op, inputs, name=f"{name}/{what}", span=Span.ONCE, origin=blocks.source.node, attrs=attrs or None
        ).output()

    def const(content: object, what: str) -> Value:
        made = context.const(content, np.int32, name=f"{name}/{what}", near=blocks.source)
        made.node.set_span(Span.ONCE)
        return made

    def of_lengths(matrix: object, what: str) -> Value:
        products = add("Mul", f"{what}_terms", const(matrix, f"{what}_of_block"), blocks.lengths)
        return add("Sum", what, products, const([1], f"{what}_axis"), keep_dims=True)

    first, size = of_lengths(starts, "first"), of_lengths(sizes, "size")
    zero, one = const(0, "zero"), const(1, "one")
    longest = add("Max", "longest", size, const([0, 1], "axes"))
    places = add("Range", "places", zero, longest, one)
    numbers = add("AddV2", "rows", first, places)
    there = add("Where", "there", add("Less", "is_there", places, size))
    return add("GatherNd", "order", numbers, there, Tindices=dtypes.INT64)


def piece_with_segments(context: Context, whole: Value, parts: Sequence[int], dim: int, blocks: Blocks) -> Value:
    """Cut each replica's block of each part out of a whole value."""
    name, cut = whole.node.name, []
    for before, rows in zip([0, *accumulate(parts)], parts, strict=False):
        limits = [blocks.rows(what, rows) for what in ("begin", "end")]
        if before:
            limits = [_behind(context, limit, blocks.rows("batch", before)) for limit in limits]
        cut.append(rows_between(context, whole, name, dim, (limits[0], limits[1])))
    axis = context.const(dim, np.int32, name=f"{name}/segments_axis", near=whole)
    return context.add(
        "ConcatV2",
        [*cut, axis],
        name=f"{name}/segments",
        span=Span.EACH,
        origin=whole.node,
        attrs={"N": len(cut)},
    ).output()


def _behind(context: Context, limit: Value, rows: Value) -> Value:
    name = f"{limit.node.name}/behind"
    return context.add("AddV2", [limit, rows], name=name, span=Span.EACH, origin=limit.node).output()
