"""int8_ef: a gradient travels as whole numbers from -127 to 127, times one number for all of it.

    dw + residual ──► scale = largest / 127 ──► round(. / scale), scale ──gather──► scale * number, added up
    residual := what rounding took away

The scale is that of the largest finite element. What is not finite is sent as -128, and arrives as NaN.

After Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs (2014), with 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autograph_rewrite.codecs.codec import Array, Code, Codec, Gradient, Nodes, Price, Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.value import Value

STEPS = 127.0
NOT_FINITE = -128.0
_SMALLEST = 2.0**-120
"""A scale below which 127 steps are no normal numbers of float32 any more: what is so small is kept back instead."""


class Int8(Codec):
    """Sends each element as one byte."""

    price = Price(passes=8.0, memory=0.5, ops=25)

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return the numbers and their scale."""
        return Code(dtypes.INT8, (math.prod(shape),)), Code(dtype, (1,))

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Round to the nearest number; halves to even ones."""
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
        """Multiply the numbers of each sender by its scale.

        Args:
            build: adds nodes.
            gradient: of one member.
            codes: numbers, [members, n], and scales, [members, 1].
        """
        numbers = build.op("Cast", codes[0], what="wide", DstT=gradient.dtype)
        lost = build.op("Equal", numbers, build.const(NOT_FINITE, gradient.dtype, "marker"), what="is_lost")
        values = build.op("Mul", numbers, codes[1], what="values")
        return build.op("SelectV2", lost, build.const(np.nan, gradient.dtype, "nan"), values, what="decoded")

    def obstacle(self, shape: Shape) -> str:
        """Nothing has no largest element."""
        return "it has no elements" if 0 in shape else ""

    def most_kept(self, total: Array, members: int) -> float:
        """Half a step of each element."""
        step = float(np.abs(total).max(initial=0.0)) / STEPS
        return float(np.sqrt(total.size) * (step / 2 if step >= _SMALLEST else STEPS * _SMALLEST))
