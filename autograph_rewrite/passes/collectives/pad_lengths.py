"""Padded outputs: blocks of other lengths are padded with zeros to the longest process's, before they are gathered.

    process 0   logits [2, 3, 10] ─┐ lengths    ┌─► Pad ─► [2, 5, 10] ─┐ gathered
    process 1   logits [6, 5, 10] ─┘ exchanged ─┴──────► [6, 5, 10] ─┴───────► [8, 5, 10]

Nothing is computed on the zeros: only the outside reads these values. As in TensorFlow's dynamic padding for TPUs, with
`padding: power_of_two` a length is the next power of two from 2 on, so that few shapes turn up.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Span, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.plan.parts.messages import SIZES

_BITS = 31
"""Of a length that is not negative."""


def pad_lengths(exchange: Exchange, part: Value, rank: int, blocks: Blocks) -> Value:
    """Return this process's part as long as the longest in the dimensions that the edge names.

    Args:
        exchange: the edge.
        part: of this process, made once.
        rank: of it.
        blocks: exchange sizes.
    """
    context, edge = exchange.context, exchange.planned
    if not edge.padded:
        return part
    build = Builder.of(context, part, f"{part.node.name}/lengths", span=Span.ONCE)
    shape = build.op("Shape", part, what="shape")
    row = build.op("Reshape", shape, build.numbers([1, rank], "as_row"), what="row")
    table = blocks.of_each_process(row, context.edges[edge.value, SIZES], part, is_row=True)
    longest = build.op("Max", table, build.numbers(0, "processes"), what="longest")
    if context.plan.padding == "power_of_two":
        longest = _next_power_of_two(build, longest)
    missing = build.op("Sub", longest, shape, what="missing")
    chosen = np.zeros((rank, 1), np.int32)
    chosen[list(edge.padded)] = 1
    column = build.op("Reshape", missing, build.numbers([rank, 1], "as_column"), what="column")
    behind = build.op("Mul", column, build.numbers(chosen * [[0, 1]], "behind"), what="paddings")
    return build.op("Pad", part, behind, what="padded")


def _next_power_of_two(build: Builder, lengths: Value) -> Value:
    """Return for each length the next power of two, at least 2: as many doublings as powers from 2 on are smaller."""
    powers = build.numbers([[2**bit] for bit in range(1, _BITS)], "powers")
    smaller = build.op("Cast", build.op("Less", powers, lengths, what="smaller"), what="each", DstT=dtypes.INT32)
    doublings = build.op("Sum", smaller, build.numbers(0, "powers_axis"), what="doublings")
    return build.op("LeftShift", build.numbers(2, "two"), doublings, what="rounded")
