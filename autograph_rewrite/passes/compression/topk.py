"""topk: each member sends its largest elements, and keeps the others for later steps.

    dw + residual ──► k values, k positions ──gather──► zeros with all of them added          residual := the others

Values travel as their bits beside the positions, in one exchange; a bit is a bit, so NaN and infinity arrive as such.
Elements that are not finite count as largest.

After Lin et al., Deep Gradient Compression (2018), without its momentum correction and warm-up. Error feedback:
Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes (2019).
"""

from __future__ import annotations

import math

from autograph_rewrite.analysis.facts.placement import Fact
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.compression_record import CompressedSum
from autograph_rewrite.passes.collectives.all_gather import vectors_of_members
from autograph_rewrite.passes.collectives.all_reduce import contribution
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.wire_values import cast
from autograph_rewrite.passes.compression.compressor_state import residual_of
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import kept, static_shape

_WORD = 4  # bytes of int32


def reduce_topk(exchange: Exchange, value: Value, fact: Fact) -> Value:
    """Return the sum of the largest elements of all members.

    Args:
        exchange: the edge that is lowered, with its compressor and keys.
        value: the gradient of each replica, of n elements; max(1, ceil(n / 100)) are sent.
        fact: of it.
    """
    context, edge = exchange.context, exchange.planned
    full = contribution(exchange, value, fact)
    build = Builder.of(context, full, f"{value.node.name}/topk", origin=value.node)
    wide = wire_types.wire_type(fact.dtype, "sum")
    shape = static_shape(fact)
    count = math.prod(shape)
    line = build.const([-1], dtypes.INT32, "line")
    zero = build.const(0, dtypes.INT32, "first")

    residual = residual_of(context, full, fact, edge)
    total = build.op("AddV2", full, residual.before, what="total")
    flat = build.op("Reshape", total, line, what="flat")
    finite = build.op("IsFinite", flat, what="is_finite")
    size = build.op("Abs", flat, what="size")
    size = build.op("SelectV2", finite, size, build.const(math.inf, wide, "infinity"), what="rank_by")
    largest = build.op("TopKV2", size, build.const(kept(count), dtypes.INT32, "k"), what="largest")
    places = largest.node.output(1)
    chosen = build.op("GatherV2", flat, places, zero, what="chosen")

    at, values = _exchanged(exchange, build, chosen, places, wide)
    elements = build.const(count, dtypes.INT32, "elements")
    summed = build.common("UnsortedSegmentSum", values, at, elements, what="sum")
    dims = build.const(shape, dtypes.INT32, "shape")
    summed = build.common("Reshape", summed, dims, what="unflat")
    result = cast(context, summed, fact.dtype, f"{value.node.name}/narrow")

    column = build.op("ExpandDims", places, build.const(1, dtypes.INT32, "column"), what="column_of_places")
    nothing = build.op("ZerosLike", chosen, what="nothing")
    others = build.op("TensorScatterUpdate", flat, column, nothing, what="others")
    others = build.op("Reshape", others, dims, what="rest")
    is_finite = build.op("Reshape", finite, dims, what="keeps")
    after = build.op("SelectV2", is_finite, others, residual.before, what="residual")
    residual.becomes(after, result)
    seen = full if exchange.adds_micro_batches else value
    context.compressed.append(CompressedSum(edge, seen, residual.before, after, result))
    return result


def _exchanged(exchange: Exchange, build: Builder, chosen: Value, places: Value, wide: int) -> tuple[Value, Value]:
    """Return positions and values of all members, given one's."""
    line = build.const([-1], dtypes.INT32, "flat_line")
    first, second = build.const(0, dtypes.INT32, "join"), build.const(1, dtypes.INT32, "cut")
    words = dtypes.width(wide) // _WORD
    bits = build.op("Bitcast", chosen, what="bits", type=dtypes.INT32)
    sent = build.op("ConcatV2", build.op("Reshape", bits, line, what="words"), places, first, what="sent", N=2)
    every = vectors_of_members(exchange, sent, build.name)
    # A member sends the words of k values, then k positions: as many lines of k as a value has words, and one more.
    rows = build.const([exchange.members, words + 1, -1], dtypes.INT32, "lines")
    table = build.common("Reshape", every, rows, what="table")
    sizes = build.const([words, 1], dtypes.INT32, "sizes")
    parts = build.common("SplitV", table, sizes, second, what="parts", num_split=2)
    at = build.common("Reshape", parts.node.output(1), line, what="places")
    shape = build.const([-1] if words == 1 else [-1, words], dtypes.INT32, "value_words")
    values = build.common("Reshape", parts, shape, what="value_bits")
    return at, build.common("Bitcast", values, what="values", type=wide)
