"""fp16, bf16 and both with error feedback: a gradient travels in 16 bits.

fp16       dw ──► * 2^-k ──► half ──► sum ──► float ──► * 2^k          2^k >= N: the sum cannot overflow
fp16_ef    dw + residual ──► half ──► sum in float                     residual := what the cast took away
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autograph_rewrite.codecs.codec import Array, Code, Codec, Gradient, Nodes, Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.value import Value

LARGEST = {dtypes.HALF: (65504.0, 11), dtypes.BFLOAT16: (float(np.uint32(0x7F7F0000).view(np.float32)), 8)}
"""The largest finite number of each type, and the bits of its significand."""
GATHERED_UP_TO = 3
"""Up to so many members, halves with error feedback are gathered and added in full precision, so that nothing is lost.

On a ring a gather moves (N - 1) 2n bytes, a sum in 16 bits 2 (N - 1) / N of 2n, and one in float32 of 4n: beyond 3
replicas a gather saves nothing any more. There the halves are added as halves, and what those additions round away is
not fed back.
"""
_TINY = 2.0**-24  # the least fp16 above zero; far below what matters in bf16


class Cast16(Codec):
    """Sends each element in 16 bits.

    Args:
        wire: number of the 16-bit type.
        error_feedback: keeps what the type takes away; else numbers are scaled so that no sum overflows.
    """

    adds = elementwise = True

    def __init__(self, wire: int, *, error_feedback: bool) -> None:
        self.wire = wire
        self.error_feedback = error_feedback
        self.gather_up_to = GATHERED_UP_TO if error_feedback else 0
        self.added_bits = LARGEST[wire][1]

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return the one tensor that is sent."""
        return (Code(self.wire, (math.prod(shape),)),)

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Cast, scaled or cut at what the sum of all can hold; NaN and infinity go through."""
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
        """Cast back.

        Args:
            build: adds nodes.
            gradient: of one member.
            codes: one, of any shape: a sum, or several.
        """
        value = build.op("Cast", codes[0], what="widen", DstT=gradient.dtype)
        exponent = 0 if self.error_feedback else self._exponent(gradient.members)
        if not exponent:
            return value
        return build.op("Mul", value, build.const(2.0**exponent, gradient.dtype, "up"), what="unscaled")

    def _exponent(self, members: int) -> int:
        """The power of two that keeps the sum of all members within the type; bfloat16 is as wide as float32."""
        return math.ceil(math.log2(members)) if self.wire == dtypes.HALF else 0

    def most_kept(self, total: Array, members: int) -> float:
        """Half of the last bit, and what did not fit."""
        over = np.maximum(np.abs(total) - largest_of_sum(self.wire, members), 0)
        return float(np.linalg.norm((2.0 ** -LARGEST[self.wire][1] * np.abs(total) + _TINY + over).ravel()))

    def sent(self, gradient: Array, members: int) -> Array:
        """Return what 16 bits make of a gradient."""
        scale = 2.0 ** self._exponent(members)
        scaled = (gradient / scale).astype(np.float32)
        with np.errstate(over="ignore"):
            narrow = scaled.astype(np.float16) if self.wire == dtypes.HALF else _bfloat16(scaled)
        return narrow.astype(np.float64) * scale


def _bfloat16(array: Array) -> Array:
    """Round to the nearest number of 16 bits, halves to even ones: numpy has no such type."""
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def largest_of_sum(wire: int, members: int) -> float:
    """Return a number of a type, near the largest of which so many can be added although every sum may round up."""
    largest, bits = LARGEST[wire]
    fraction, exponent = math.frexp(largest / members / (1 + 2.0**-bits) ** (members - 1))
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)
