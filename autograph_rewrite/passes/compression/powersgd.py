"""powersgd: a matrix travels as the product of two thin ones (Vogels, Karimireddy and Jaggi 2019), rank 2.

    M = dw + residual   [m, n]
    P = sum over replicas of M Q            [m, 2]   then its columns are made orthonormal
    R = sum over replicas of M^T P          [n, 2]   one replica's term: r
    dw becomes P R^T,  residual := M - P r^T         so that sum and residuals together are exactly what there was

Q is kept: the columns of R, each of length 1, are the start of the next step, which makes the steps a power iteration.
A column that is zero (at the start, after a gradient of zero) is replaced by a fixed one.
"""

from __future__ import annotations

from dataclasses import replace

from autograph_rewrite.analysis.facts.placement import Fact
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.compression_record import CompressedSum
from autograph_rewrite.passes.collectives.all_reduce import contribution, sum_of_members
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.wire_values import cast
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable, auxiliary_name, residual_of
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import FACTOR, RANK, matrix, shape_of, static_shape

_PARALLEL = 1e-4
"""Sine of the angle below which the second column counts as a multiple of the first, and is left out."""
_FREQUENCIES = [[0.7, 1.9]]
"""Of the waves that the columns of Q are where there is nothing better."""


def reduce_powersgd(exchange: Exchange, value: Value, fact: Fact) -> Value:
    """Return the sum of all replicas' matrices as far as the two factors hold it.

    Args:
        exchange: the edge that is lowered, with its compressor and keys.
        value: the gradient of each replica, seen as [m, n]; the factors are [m, 2] and [n, 2].
        fact: of it.
    """
    context, edge = exchange.context, exchange.planned
    full = contribution(exchange, value, fact)
    build = Builder.of(context, full, f"{value.node.name}/powersgd", origin=value.node)
    wide = wire_types.wire_type(fact.dtype, "sum")
    shape = static_shape(fact)
    rows, columns = matrix(shape_of(fact, context.owners.get(edge.owner)))
    residual = residual_of(context, full, fact, edge)
    start = AuxiliaryVariable(context, auxiliary_name(edge.owner, "q"), (columns, RANK), wide, near=full)

    total = build.op("AddV2", full, residual.before, what="total")
    size = build.const([rows, columns], dtypes.INT32, "matrix_shape")
    m = build.op("Reshape", total, size, what="matrix")
    q = _started(build, start.before, columns, wide)
    p = sum_of_members(exchange, build.op("MatMul", m, q, what="p"), f"{build.name}/p")
    p = _orthonormal(build, p, wide)
    mine = build.op("MatMul", m, p, what="r", transpose_a=True)
    second = next(e for e in context.plan.edges if (e.value, e.to, e.role) == (edge.value, edge.to, FACTOR))
    r = sum_of_members(replace(exchange, edge=second), mine, f"{build.name}/{FACTOR}")

    dims = build.const(shape, dtypes.INT32, "shape")
    product = build.common("MatMul", p, r, what="product", transpose_b=True)
    product = build.common("Reshape", product, dims, what="unflat")
    result = cast(context, product, fact.dtype, f"{value.node.name}/narrow")

    sent = build.op("Reshape", build.op("MatMul", p, mine, what="mine", transpose_b=True), dims, what="sent")
    rest = build.op("Sub", total, sent, what="rest")
    after = build.op("SelectV2", build.op("IsFinite", rest, what="keeps"), rest, residual.before, what="residual")
    residual.becomes(after, result)
    start.becomes(_finite_units(build, r, wide), result)
    seen = full if exchange.adds_micro_batches else value
    context.compressed.append(CompressedSum(edge, seen, residual.before, after, result))
    return result


def _started(build: Builder, kept: Value, columns: int, wide: int) -> Value:
    """Return the columns of the last step, waves in place of those that are zero."""
    zero, one = build.const(0, dtypes.INT32, "zero"), build.const(1, dtypes.INT32, "one")
    count = build.common("Range", zero, build.const(columns, dtypes.INT32, "columns"), one, what="count")
    column = build.common("ExpandDims", count, one, what="column")
    along = build.common("Cast", column, what="along", DstT=wide)
    waves = build.common("Mul", along, build.const(_FREQUENCIES, wide, "frequencies"), what="phase")
    waves = build.common("Cos", waves, what="waves")
    used = build.op("NotEqual", kept, build.const(0, wide, "nothing"), what="not_zero")
    used = build.op("Any", used, zero, what="is_used", keep_dims=True)
    return build.op("SelectV2", used, kept, waves, what="q")


class _Columns:
    """Arithmetic on single columns, [n, 1]."""

    def __init__(self, build: Builder, wide: int, name: str) -> None:
        self._build, self._wide, self._name = build, wide, name
        self._axis = build.const(0, dtypes.INT32, f"{name}/axis")

    def op(self, op: str, *inputs: Value, what: str, **attrs: object) -> Value:
        return self._build.common(op, *inputs, what=f"{self._name}/{what}", **attrs)

    def total(self, op: str, a: Value, what: str) -> Value:
        return self.op(op, a, self._axis, what=what, keep_dims=True)

    def dot(self, a: Value, b: Value, what: str) -> Value:
        return self.total("Sum", self.op("Mul", a, b, what=f"{what}_terms"), what)

    def unit(self, a: Value, what: str) -> Value:
        """Return a column of length 1 (zero if `a` is); scaled first, so that no square overflows or vanishes."""
        largest = self.total("Max", self.op("Abs", a, what=f"{what}_sizes"), f"{what}_largest")
        scaled = self.op("DivNoNan", a, largest, what=f"{what}_scaled")
        length = self.op("Sqrt", self.dot(scaled, scaled, f"{what}_square"), what=f"{what}_length")
        return self.op("DivNoNan", scaled, length, what=what)

    def without(self, a: Value, part: Value, what: str) -> Value:
        """Return `a` less what it has in the direction of the unit column `part`."""
        along = self.op("Mul", part, self.dot(part, a, f"{what}_share"), what=f"{what}_along")
        return self.op("Sub", a, along, what=what)

    def const(self, content: object, what: str) -> Value:
        return self._build.const(content, self._wide, f"{self._name}/{what}")


def _orthonormal(build: Builder, p: Value, wide: int) -> Value:
    """Return the columns as orthonormal ones (Gram-Schmidt, twice); what is no new direction becomes zero."""
    do = _Columns(build, wide, "orthonormal")
    axis = build.const(1, dtypes.INT32, "orthonormal/columns")
    split = do.op("Split", axis, p, what="split", num_split=RANK).node
    first = do.unit(split.output(0), "first")
    second = do.unit(split.output(1), "second_alone")
    for attempt in ("once", "twice"):
        second = do.without(second, first, f"second_{attempt}")
    length = do.op("Sqrt", do.dot(second, second, "sine_square"), what="sine")
    is_new = do.op("Greater", length, do.const(_PARALLEL, "parallel"), what="is_new")
    unit = do.op("DivNoNan", second, length, what="second")
    second = do.op("SelectV2", is_new, unit, do.op("ZerosLike", second, what="nothing"), what="second_or_nothing")
    return do.op("ConcatV2", first, second, axis, what="p", N=RANK)


def _finite_units(build: Builder, r: Value, wide: int) -> Value:
    """Return the columns at length 1; one that is not finite becomes zero, so that it is started anew."""
    do = _Columns(build, wide, "next")
    units = do.unit(r, "units")
    finite = do.total("All", do.op("IsFinite", units, what="finite"), "is_finite")
    return do.op("SelectV2", finite, units, do.op("ZerosLike", units, what="nothing"), what="q")
