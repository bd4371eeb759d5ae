"""topk: each member sends its largest elements, and keeps the others for later steps.

    dw + residual ──► k values, k positions ──gather──► zeros with all of them added          residual := the others

Values travel as their bits beside the positions, in one exchange; a bit is a bit, so NaN and infinity arrive as such.
Elements that are not finite count as largest.
"""

from __future__ import annotations

import math

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.added import residual_of
from autograph_rewrite.passes.compress_choice import kept, static_shape
from autograph_rewrite.passes.compressed import CompressedSum
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.exchange import contribution, gather_all, members
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.scope import Scope
from autograph_rewrite.plan.parts import EdgePlan

_WORD = 4  # bytes of int32


def reduce_largest(context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys) -> Value:
    """Return the sum of the largest elements of all members."""
    full = contribution(context, value, fact, edge)
    scope = Scope(context, full, f"{value.node.name}/topk", origin=value.node)
    wide = combine.wire_type(fact.dtype, "sum")
    shape = static_shape(fact)
    count = math.prod(shape)
    line = scope.const([-1], dtypes.INT32, "line")
    zero = scope.const(0, dtypes.INT32, "first")

    residual = residual_of(context, full, fact, edge)
    total = scope.each("AddV2", full, residual.before, what="total")
    flat = scope.each("Reshape", total, line, what="flat")
    finite = scope.each("IsFinite", flat, what="is_finite")
    size = scope.each("Abs", flat, what="size")
    size = scope.each("SelectV2", finite, size, scope.const(math.inf, wide, "infinity"), what="rank_by")
    largest = scope.each("TopKV2", size, scope.const(kept(count), dtypes.INT32, "k"), what="largest")
    places = largest.node.output(1)
    chosen = scope.each("GatherV2", flat, places, zero, what="chosen")

    at, values = _exchanged(scope, chosen, places, edge, keys, wide)
    elements = scope.const(count, dtypes.INT32, "elements")
    summed = scope.common("UnsortedSegmentSum", values, at, elements, what="sum")
    dims = scope.const(shape, dtypes.INT32, "shape")
    summed = scope.common("Reshape", summed, dims, what="unflat")
    result = combine.cast(context, summed, fact.dtype, f"{value.node.name}/narrow")

    column = scope.each("ExpandDims", places, scope.const(1, dtypes.INT32, "column"), what="column_of_places")
    nothing = scope.each("ZerosLike", chosen, what="nothing")
    others = scope.each("TensorScatterUpdate", flat, column, nothing, what="others")
    others = scope.each("Reshape", others, dims, what="rest")
    is_finite = scope.each("Reshape", finite, dims, what="keeps")
    after = scope.each("SelectV2", is_finite, others, residual.before, what="residual")
    residual.becomes(after, result)
    context.compressed.append(CompressedSum(edge, value, residual.before, after, result))
    return result


def _exchanged(
    scope: Scope, chosen: Value, places: Value, edge: EdgePlan, keys: Keys, wide: int
) -> tuple[Value, Value]:
    """Return positions and values of all members, given one's."""
    line = scope.const([-1], dtypes.INT32, "flat_line")
    first, second = scope.const(0, dtypes.INT32, "join"), scope.const(1, dtypes.INT32, "cut")
    words = dtypes.width(wide) // _WORD
    bits = scope.each("Bitcast", chosen, what="bits", type=dtypes.INT32)
    sent = scope.each("ConcatV2", scope.each("Reshape", bits, line, what="words"), places, first, what="sent", N=2)
    every = gather_all(scope, sent, edge, keys)
    # A member sends the words of k values, then k positions: as many lines of k as a value has words, and one more.
    rows = scope.const([members(scope.context, edge), words + 1, -1], dtypes.INT32, "lines")
    table = scope.common("Reshape", every, rows, what="table")
    sizes = scope.const([words, 1], dtypes.INT32, "sizes")
    parts = scope.common("SplitV", table, sizes, second, what="parts", num_split=2)
    at = scope.common("Reshape", parts.node.output(1), line, what="places")
    shape = scope.const([-1] if words == 1 else [-1, words], dtypes.INT32, "value_words")
    values = scope.common("Reshape", parts, shape, what="value_bits")
    return at, scope.common("Bitcast", values, what="values", type=wide)
