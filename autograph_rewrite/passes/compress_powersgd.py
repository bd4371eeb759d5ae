"""powersgd: a matrix travels as the product of two thin ones (Vogels, Karimireddy and Jaggi 2019), rank 2.

    M = dw + residual   [m, n]
    P = sum over replicas of M Q            [m, 2]   then its columns are made orthonormal
    R = sum over replicas of M^T P          [n, 2]   one replica's term: r
    dw becomes P R^T,  residual := M - P r^T         so that sum and residuals together are exactly what there was

Q is kept: the columns of R, each of length 1, are the start of the next step, which makes the steps a power iteration.
A column that is zero (at the start, after a gradient of zero) is replaced by a fixed one.
"""

from __future__ import annotations

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.added import Added, residual_of
from autograph_rewrite.passes.compress_choice import FACTOR, RANK, matrix, shape_of, static_shape
from autograph_rewrite.passes.compressed import CompressedSum
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.exchange import add_up, contribution
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.scope import Scope
from autograph_rewrite.plan.parts import EdgePlan

_PARALLEL = 1e-4
"""Sine of the angle below which the second column counts as a multiple of the first, and is left out."""
_FREQUENCIES = [[0.7, 1.9]]
"""Of the waves that the columns of Q are where there is nothing better."""


def reduce_factors(context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys) -> Value:
    """Return the sum of all replicas' matrices as far as the two factors hold it."""
    full = contribution(context, value, fact, edge)
    scope = Scope(context, full, f"{value.node.name}/powersgd", origin=value.node)
    wide = combine.wire_type(fact.dtype, "sum")
    shape = static_shape(fact)
    rows, columns = matrix(shape_of(fact, context.owners.get(edge.owner)))
    residual = residual_of(context, full, fact, edge)
    start = Added(context, edge.owner, "q", (columns, RANK), wide, near=full)

    total = scope.each("AddV2", full, residual.before, what="total")
    size = scope.const([rows, columns], dtypes.INT32, "matrix_shape")
    m = scope.each("Reshape", total, size, what="matrix")
    q = _started(scope, start.before, columns, wide)
    p = add_up(scope, scope.each("MatMul", m, q, what="p"), edge, keys, "p/")
    p = _orthonormal(scope, p, wide)
    mine = scope.each("MatMul", m, p, what="r", transpose_a=True)
    second = next(e for e in context.plan.edges if (e.value, e.to, e.role) == (edge.value, edge.to, FACTOR))
    r = add_up(scope, mine, second, keys, f"{FACTOR}/")

    dims = scope.const(shape, dtypes.INT32, "shape")
    product = scope.common("MatMul", p, r, what="product", transpose_b=True)
    product = scope.common("Reshape", product, dims, what="unflat")
    result = combine.cast(context, product, fact.dtype, f"{value.node.name}/narrow")

    sent = scope.each("Reshape", scope.each("MatMul", p, mine, what="mine", transpose_b=True), dims, what="sent")
    rest = scope.each("Sub", total, sent, what="rest")
    after = scope.each("SelectV2", scope.each("IsFinite", rest, what="keeps"), rest, residual.before, what="residual")
    residual.becomes(after, result)
    start.becomes(_finite_units(scope, r, wide), result)
    context.compressed.append(CompressedSum(edge, value, residual.before, after, result))
    return result


def _started(scope: Scope, kept: Value, columns: int, wide: int) -> Value:
    """Return the columns of the last step, waves in place of those that are zero."""
    zero, one = scope.const(0, dtypes.INT32, "zero"), scope.const(1, dtypes.INT32, "one")
    count = scope.common("Range", zero, scope.const(columns, dtypes.INT32, "columns"), one, what="count")
    column = scope.common("ExpandDims", count, one, what="column")
    along = scope.common("Cast", column, what="along", DstT=wide)
    waves = scope.common("Mul", along, scope.const(_FREQUENCIES, wide, "frequencies"), what="phase")
    waves = scope.common("Cos", waves, what="waves")
    used = scope.each("NotEqual", kept, scope.const(0, wide, "nothing"), what="not_zero")
    used = scope.each("Any", used, zero, what="is_used", keep_dims=True)
    return scope.each("SelectV2", used, kept, waves, what="q")


class _Columns:
    """Arithmetic on single columns, [n, 1]."""

    def __init__(self, scope: Scope, wide: int, name: str) -> None:
        self._scope, self._wide, self._name = scope, wide, name
        self._axis = scope.const(0, dtypes.INT32, f"{name}/axis")

    def op(self, op: str, *inputs: Value, what: str, **attrs: object) -> Value:
        return self._scope.common(op, *inputs, what=f"{self._name}/{what}", **attrs)

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
        return self._scope.const(content, self._wide, f"{self._name}/{what}")


def _orthonormal(scope: Scope, p: Value, wide: int) -> Value:
    """Return the columns as orthonormal ones (Gram-Schmidt, twice); what is no new direction becomes zero."""
    do = _Columns(scope, wide, "orthonormal")
    axis = scope.const(1, dtypes.INT32, "orthonormal/columns")
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


def _finite_units(scope: Scope, r: Value, wide: int) -> Value:
    """Return the columns at length 1; one that is not finite becomes zero, so that it is started anew."""
    do = _Columns(scope, wide, "next")
    units = do.unit(r, "units")
    finite = do.total("All", do.op("IsFinite", units, what="finite"), "is_finite")
    return do.op("SelectV2", finite, units, do.op("ZerosLike", units, what="nothing"), what="q")
