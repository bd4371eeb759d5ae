"""powersgd: a matrix travels as the product of two thin ones (Vogels, Karimireddy and Jaggi 2019), rank 2.

    M = dw + residual   [m, n]
    P = sum over replicas of M Q            [m, 2]   then its columns are made orthonormal
    R = sum over replicas of M^T P          [n, 2]   one replica's term: r
    dw becomes P R^T,  residual := M - P r^T         so that sum and residuals together are exactly what there was

Q is kept: the columns of R, each of length 1, are the start of the next step, which makes the steps a power iteration.
A column that is zero (at the start, after a gradient of zero) is replaced by a fixed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autograph_rewrite.codecs.codec import Code, Codec, Gradient, Nodes, Price, Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.value import Value

RANK = 2
"""Columns of the factors."""
_PARALLEL = 1e-4
"""Sine of the angle below which the second column counts as a multiple of the first, and is left out."""
_FREQUENCIES = [[0.7, 1.9]]
"""Of the waves that the columns of Q are where there is nothing better."""


def matrix(shape: Shape) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


class PowerSGD(Codec):
    """Sends two factors of a matrix, one after the other."""

    adds = spreads = True
    price = Price(passes=12.0, memory=1.0, ops=60)

    def rounds(self, shape: Shape, dtype: int) -> tuple[tuple[Code, ...], ...]:
        """Return the two factors."""
        return tuple((Code(dtype, (side, RANK)),) for side in matrix(shape))

    def state(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the start of the next step."""
        return {"q": (matrix(shape)[1], RANK)}

    def encode_round(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> tuple[Value, ...]:
        """Return the member's part of P, then that of R.

        Args:
            build: adds nodes.
            gradient: of the member, seen as [m, n].
            received: nothing, or P [m, 2].
        """
        rows, columns = matrix(gradient.shape)
        if received:
            m = build.op("Reshape", gradient.value, build.numbers([rows, columns], "again"), what="matrix_again")
            return (build.op("MatMul", m, received[0], what="r", transpose_a=True),)
        m = build.op("Reshape", gradient.value, build.numbers([rows, columns], "matrix_shape"), what="matrix")
        q = _started(build, gradient.state["q"], columns, gradient.dtype)
        return (build.op("MatMul", m, q, what="p"),)

    def receive(self, build: Nodes, gradient: Gradient, total: Value) -> Value:
        """Make the columns of P orthonormal.

        Args:
            build: adds nodes.
            gradient: of the member.
            total: P [m, 2].
        """
        return _orthonormal(build, total, gradient.dtype)

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Multiply the factors.

        Args:
            build: adds nodes.
            gradient: of one member.
            codes: P [m, 2] and R [n, 2].
        """
        return build.op("MatMul", *codes, what="product", transpose_b=True)

    def update(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> Mapping[str, Value]:
        """Start the next step with the columns of R.

        Args:
            build: adds nodes.
            gradient: of the member.
            received: P [m, 2] and R [n, 2].
        """
        return {"q": _finite_units(build, received[1], gradient.dtype)}

    def obstacle(self, shape: Shape) -> str:
        """Factors of rank 2 hold a vector that they need not hold."""
        return "it is no matrix" if min(matrix(shape)) < 2 else ""


def _started(build: Nodes, kept: Value, columns: int, wide: int) -> Value:
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

    def __init__(self, build: Nodes, wide: int, name: str) -> None:
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


def _orthonormal(build: Nodes, p: Value, wide: int) -> Value:
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


def _finite_units(build: Nodes, r: Value, wide: int) -> Value:
    """Return the columns at length 1; one that is not finite becomes zero, so that it is started anew."""
    do = _Columns(build, wide, "next")
    units = do.unit(r, "units")
    finite = do.total("All", do.op("IsFinite", units, what="finite"), "is_finite")
    return do.op("SelectV2", finite, units, do.op("ZerosLike", units, what="nothing"), what="q")
