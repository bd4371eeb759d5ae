"""Define the built-in codecs, by their names in configurations and plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autograph_rewrite.codecs.codec import Array, Code, Codec, Gradient, Nodes, Price, Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.value import Value

# fp16, bf16 and both with error feedback: a gradient travels in 16 bits.
#
# fp16       dw ──► * 2^-k ──► half ──► sum ──► float ──► * 2^k          2^k >= N: the sum cannot overflow
# fp16_ef    dw + residual ──► half ──► sum in float                     residual := what the cast lost

LARGEST = {dtypes.HALF: (65504.0, 11), dtypes.BFLOAT16: (float(np.uint32(0x7F7F0000).view(np.float32)), 8)}
"""The largest finite number of each type, and the bits of its significand."""
GATHERED_UP_TO = 3
"""Up to this many members, halves with error feedback are gathered and added in full precision without any loss.

On a ring a gather moves (N - 1) 2n bytes, a sum in 16 bits 2 (N - 1) / N of 2n, and a sum in float32 of 4n: beyond 3
replicas a gather saves nothing. There the halves are added as halves, and the rounding errors of those additions are
not fed back.
"""
_TINY = 2.0**-24  # the least fp16 above zero; negligible in bf16


class Cast16(Codec):
    """Sends each element in 16 bits.

    Args:
        wire: number of the 16-bit type.
        error_feedback: keep the rounding errors; else numbers are scaled so that no sum overflows.
    """

    adds = elementwise = True

    def __init__(self, wire: int, *, error_feedback: bool) -> None:
        self.wire = wire
        self.error_feedback = error_feedback
        self.gather_up_to = GATHERED_UP_TO if error_feedback else 0
        self.added_bits = LARGEST[wire][1]

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return the one tensor that a member sends."""
        return (Code(self.wire, (math.prod(shape),)),)

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Scale, or clip so that the sum of all members fits, then cast; NaN and infinity stay."""
        value, dtype = gradient.value, gradient.dtype
        if self.error_feedback:
            most = largest_of_sum(self.wire, gradient.members)
            limits = [build.const(sign * most, dtype, what) for sign, what in ((-1, "least"), (1, "most"))]
            clipped = build.op("ClipByValue", value, *limits, what="clipped")
            finite = build.op("IsFinite", value, what="is_finite")
            value = build.op("SelectV2", finite, clipped, value, what="sent")
        elif exponent := self._exponent(gradient.members):
            value = build.op("Mul", value, build.const(2.0**-exponent, dtype, "down"), what="scaled")
        return (build.op("Cast", value, what="code", DstT=self.wire),)

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Cast a code back, whether it is a sum or gathered codes."""
        value = build.op("Cast", codes[0], what="widen", DstT=gradient.dtype)
        exponent = 0 if self.error_feedback else self._exponent(gradient.members)
        if not exponent:
            return value
        return build.op("Mul", value, build.const(2.0**exponent, gradient.dtype, "up"), what="unscaled")

    def _exponent(self, members: int) -> int:
        """Return the power of two that keeps the sum of all members finite; bfloat16 has the range of float32."""
        return math.ceil(math.log2(members)) if self.wire == dtypes.HALF else 0

    def most_kept(self, total: Array, members: int) -> float:
        """Return the norm of half of each last bit and of the clipped parts."""
        over = np.maximum(np.abs(total) - largest_of_sum(self.wire, members), 0)
        return float(np.linalg.norm((2.0 ** -LARGEST[self.wire][1] * np.abs(total) + _TINY + over).ravel()))

    def sent(self, gradient: Array, members: int) -> Array:
        """Return a gradient rounded to 16 bits."""
        scale = 2.0 ** self._exponent(members)
        scaled = (gradient / scale).astype(np.float32)
        with np.errstate(over="ignore"):
            narrow = scaled.astype(np.float16) if self.wire == dtypes.HALF else _bfloat16(scaled)
        return narrow.astype(np.float64) * scale


def _bfloat16(array: Array) -> Array:
    """Round to the nearest bfloat16, ties to even; numpy has no such type."""
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def largest_of_sum(wire: int, members: int) -> float:
    """Return about the largest number of a type of which `members` add up without overflow if every sum rounds up."""
    largest, bits = LARGEST[wire]
    fraction, exponent = math.frexp(largest / members / (1 + 2.0**-bits) ** (members - 1))
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)


# int8_ef: a gradient travels as integers from -127 to 127 and one scale.
#
#     dw + residual ──► scale = largest / 127 ──► round(. / scale), scale ──gather──► scale * number, added up
#     residual := what rounding lost
#
# The scale is that of the largest finite element. Elements that are not finite are sent as -128 and arrive as NaN.
#
# After Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
# Speech DNNs (2014), with 8 bits.

STEPS = 127.0
NOT_FINITE = -128.0
_SMALLEST = 2.0**-120
"""The least scale; a gradient with a smaller one, close to the least normal float32, stays in the residual."""


class Int8(Codec):
    """Sends each element as one byte."""

    price = Price(passes=8.0, memory=0.5, ops=25)

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return the codes of the integers and their scale."""
        return Code(dtypes.INT8, (math.prod(shape),)), Code(dtype, (1,))

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Divide by the scale and round to the nearest integer, ties to even."""
        dtype, zero = gradient.dtype, build.numbers(0, "axis")
        flat = build.op("Reshape", gradient.value, build.numbers([-1], "line"), what="flat")
        finite = build.op("IsFinite", flat, what="is_finite")
        known = build.op("SelectV2", finite, flat, build.op("ZerosLike", flat, what="zeros"), what="finite")
        largest = build.op("Max", build.op("Abs", known, what="size"), zero, what="largest", keep_dims=True)
        scale = build.op("RealDiv", largest, build.const(STEPS, dtype, "steps"), what="unit")
        counts = build.op("GreaterEqual", scale, build.const(_SMALLEST, dtype, "least"), what="counts")
        scale = build.op("SelectV2", counts, scale, build.op("ZerosLike", scale, what="no_scale"), what="scale")
        number = build.op("Round", build.op("DivNoNan", known, scale, what="divided"), what="number")
        number = build.op("SelectV2", finite, number, build.const(NOT_FINITE, dtype, "marker"), what="marked")
        return build.op("Cast", number, what="code", DstT=dtypes.INT8), scale

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Multiply the integers of each sender, [members, n], by its scale, [members, 1]."""
        numbers = build.op("Cast", codes[0], what="wide", DstT=gradient.dtype)
        lost = build.op("Equal", numbers, build.const(NOT_FINITE, gradient.dtype, "marker"), what="is_lost")
        values = build.op("Mul", numbers, codes[1], what="values")
        return build.op("SelectV2", lost, build.const(np.nan, gradient.dtype, "nan"), values, what="decoded")

    def obstacle(self, shape: Shape) -> str:
        """Refuse an empty gradient, which has no largest element."""
        return "it has no elements" if 0 in shape else ""

    def most_kept(self, total: Array, members: int) -> float:
        """Return the norm of half a step for each element."""
        step = float(np.abs(total).max(initial=0.0)) / STEPS
        return float(np.sqrt(total.size) * (step / 2 if step >= _SMALLEST else STEPS * _SMALLEST))


# topk: each member sends its largest elements, and keeps the others for later steps.
#
#     dw + residual ──► k values, k positions ──gather──► zeros with all of them added          residual := the others
#
# Values travel as bits next to their positions, in one exchange, so NaN and infinity arrive unchanged. Elements that
# are not finite count as largest.
#
# After Lin et al., Deep Gradient Compression (2018), without its momentum correction and warm-up.


def kept(count: int) -> int:
    """Return how many of `count` elements topk sends."""
    return max(1, -(-count // 100))


class TopK(Codec):
    """Sends the largest hundredth of the elements with their positions."""

    price = Price(memory=1.25, ops=25, sorts=True)

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return the codes of values and positions."""
        k = kept(math.prod(shape))
        return Code(dtype, (k,)), Code(dtypes.INT32, (k,))

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Return the largest elements and their positions."""
        flat = build.op("Reshape", gradient.value, build.numbers([-1], "line"), what="flat")
        finite = build.op("IsFinite", flat, what="is_finite")
        infinity = build.const(math.inf, gradient.dtype, "infinity")
        size = build.op("SelectV2", finite, build.op("Abs", flat, what="size"), infinity, what="rank_by")
        largest = build.op("TopKV2", size, build.numbers(kept(gradient.count), "k"), what="largest")
        places = largest.node.output(1)
        return build.op("GatherV2", flat, places, build.numbers(0, "first"), what="chosen"), places

    def decode_sum(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Add the values of all senders at their positions, [members, k] each."""
        line = build.numbers([-1], "line")
        values = build.op("Reshape", codes[0], line, what="values")
        places = build.op("Reshape", codes[1], line, what="places")
        return build.op("UnsortedSegmentSum", values, places, build.numbers(gradient.count, "elements"), what="sum")

    def obstacle(self, shape: Shape) -> str:
        """Refuse an empty gradient, which has no largest element."""
        return "" if math.prod(shape) else "it has no elements"

    def most_kept(self, total: Array, members: int) -> float:
        """Return the norm of the elements that are not sent if all are equally large, which is the worst case."""
        return super().most_kept(total, members) * math.sqrt(1 - kept(total.size) / total.size)


# powersgd: a matrix travels as the product of two thin ones (Vogels, Karimireddy and Jaggi 2019), rank 2.
#
#     M = dw + residual   [m, n]
#     P = sum over replicas of M Q            [m, 2]   then its columns are made orthonormal
#     R = sum over replicas of M^T P          [n, 2]   one replica's term: r
#     dw becomes P R^T,  residual := M - P r^T         so that the sum plus the residuals equals the sum of all M
#
# The columns of R, each scaled to length 1, are the Q of the next step, so that the steps are a power iteration. A
# column that is zero (at the start, after a gradient of zero) is replaced by a fixed one.

RANK = 2
"""Columns of the factors."""
_PARALLEL = 1e-4
"""Sine of the angle below which the second column counts as a multiple of the first and becomes zero."""
_FREQUENCIES = [[0.7, 1.9]]
"""Frequencies of the cosine waves that replace columns of Q that are zero."""


def matrix(shape: Shape) -> tuple[int, int]:
    """Return the rows (the first dimension) and columns (all others) of a tensor as a matrix."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


class PowerSGD(Codec):
    """Sends two factors of a matrix, one after the other."""

    adds = spreads = True
    price = Price(passes=12.0, memory=1.0, ops=60)

    def rounds(self, shape: Shape, dtype: int) -> tuple[tuple[Code, ...], ...]:
        """Return the code of each of the two factors."""
        return tuple((Code(dtype, (side, RANK)),) for side in matrix(shape))

    def state(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shape of Q, which is kept."""
        return {"q": (matrix(shape)[1], RANK)}

    def encode_round(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> tuple[Value, ...]:
        """Return the member's term of P [m, 2]; after P is received, its term of R [n, 2]."""
        shape = list(matrix(gradient.shape))
        if received:
            m = build.op("Reshape", gradient.value, build.numbers(shape, "again"), what="matrix_again")
            return (build.op("MatMul", m, received[0], what="r", transpose_a=True),)
        m = build.op("Reshape", gradient.value, build.numbers(shape, "matrix_shape"), what="matrix")
        q = _started(build, gradient.state["q"], shape[1], gradient.dtype)
        return (build.op("MatMul", m, q, what="p"),)

    def receive(self, build: Nodes, gradient: Gradient, total: Value) -> Value:
        """Make the columns of P [m, 2] orthonormal."""
        return _orthonormal(build, total, gradient.dtype)

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Multiply the factors, P [m, 2] and R [n, 2]."""
        return build.op("MatMul", *codes, what="product", transpose_b=True)

    def update(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> Mapping[str, Value]:
        """Keep the columns of R [n, 2] as the next Q."""
        return {"q": _finite_units(build, received[1])}

    def obstacle(self, shape: Shape) -> str:
        """Refuse a vector, for which two factors are larger than the vector itself."""
        return "it is no matrix" if min(matrix(shape)) < 2 else ""


def _started(build: Nodes, kept: Value, columns: int, wide: int) -> Value:
    """Return the columns of the last step, with waves for columns that are zero."""
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

    def __init__(self, build: Nodes, name: str) -> None:
        self._build, self._name = build, name
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
        """Return `a` minus its projection on the unit column `part`."""
        along = self.op("Mul", part, self.dot(part, a, f"{what}_share"), what=f"{what}_along")
        return self.op("Sub", a, along, what=what)


def _orthonormal(build: Nodes, p: Value, wide: int) -> Value:
    """Make the columns orthonormal (Gram-Schmidt, twice); a second column parallel to the first becomes zero."""
    do = _Columns(build, "orthonormal")
    axis = build.const(1, dtypes.INT32, "orthonormal/columns")
    split = do.op("Split", axis, p, what="split", num_split=RANK).node
    first = do.unit(split.output(0), "first")
    second = do.unit(split.output(1), "second_alone")
    for attempt in ("once", "twice"):
        second = do.without(second, first, f"second_{attempt}")
    length = do.op("Sqrt", do.dot(second, second, "sine_square"), what="sine")
    is_new = do.op("Greater", length, build.const(_PARALLEL, wide, "orthonormal/parallel"), what="is_new")
    unit = do.op("DivNoNan", second, length, what="second")
    second = do.op("SelectV2", is_new, unit, do.op("ZerosLike", second, what="nothing"), what="second_or_nothing")
    return do.op("ConcatV2", first, second, axis, what="p", N=RANK)


def _finite_units(build: Nodes, r: Value) -> Value:
    """Return the columns at length 1; a column that is not finite becomes zero, so that a wave replaces it."""
    do = _Columns(build, "next")
    units = do.unit(r, "units")
    finite = do.total("All", do.op("IsFinite", units, what="finite"), "is_finite")
    return do.op("SelectV2", finite, units, do.op("ZerosLike", units, what="nothing"), what="q")


NONE = "none"
BUILTIN: Mapping[str, Codec] = {
    "fp16": Cast16(dtypes.HALF, error_feedback=False),
    "bf16": Cast16(dtypes.BFLOAT16, error_feedback=False),
    "fp16_ef": Cast16(dtypes.HALF, error_feedback=True),
    "bf16_ef": Cast16(dtypes.BFLOAT16, error_feedback=True),
    "topk": TopK(),
    "powersgd": PowerSGD(),
    "int8_ef": Int8(),
}
