"""fp16, bf16 and both with error feedback: a gradient travels in 16 bits.

    fp16       dw ──► * 2^-k ──► half ──► sum ──► float ──► * 2^k          2^k >= N: the sum cannot overflow
    fp16_ef    dw + residual ──► half ──► sum in float                     residual := what the cast took away

Halves with error feedback are added in full precision wherever that costs no more (`compress_choice.GATHERED_UP_TO`).

Error feedback: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes (2019).
"""

from __future__ import annotations

import math

import numpy as np

from autograph_rewrite.analysis.facts.placement import Fact
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.compression_record import CompressedSum
from autograph_rewrite.passes.collectives.all_gather import vectors_of_members
from autograph_rewrite.passes.collectives.all_reduce import contribution, sum_of_members
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.wire_values import cast
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable, residual_of
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import FEEDBACK, SIXTEEN_BIT, static_shape

LARGEST = {dtypes.HALF: (65504.0, 11), dtypes.BFLOAT16: (float(np.uint32(0x7F7F0000).view(np.float32)), 8)}
"""The largest finite number of each type, and the bits of its significand."""


class Cast16:
    """A gradient on its way in 16 bits: what is sent, and what becomes of the sum.

    Args:
        exchange: the edge.
        value: contributions to a sum, one per replica.
        fact: about it.

    Attributes:
        full: what one member has.
        code: what one member sends, in the shape of the value.
        wide: the type of the sum.
    """

    def __init__(self, exchange: Exchange, value: Value, fact: Fact) -> None:
        context, edge = exchange.context, exchange.planned
        self._context, self._fact, self._edge, self._value = context, fact, edge, value
        self.wide = wire_types.wire_type(fact.dtype, "sum")
        self._wire = SIXTEEN_BIT[edge.compressor]
        self._members = exchange.members
        self._kept: tuple[AuxiliaryVariable, Value] | None = None  # the residual, and what it becomes
        self.full = full = contribution(exchange, value, fact)
        self._seen = full if exchange.adds_micro_batches else value
        self._build = Builder.of(context, full, f"{value.node.name}/compress", origin=value.node)
        self.code = self._with_feedback(full) if edge.compressor in FEEDBACK else self._scaled(full)

    @property
    def _exponent(self) -> int:
        """The power of two that keeps the sum of all members within the type; bfloat16 is as wide as float32."""
        return math.ceil(math.log2(self._members)) if self._wire == dtypes.HALF else 0

    def _scaled(self, full: Value) -> Value:
        build = self._build
        if self._exponent:
            full = build.op("Mul", full, build.const(2.0**-self._exponent, self.wide, "down"), what="scaled")
        return build.op("Cast", full, what="code", DstT=self._wire)

    def _with_feedback(self, full: Value) -> Value:
        """Send as much of gradient and residual as the type holds; NaN and infinity go through."""
        build = self._build
        residual = residual_of(self._context, full, self._fact, self._edge)
        total = build.op("AddV2", full, residual.before, what="total")
        most = largest_of_sum(self._wire, self._members)
        limits = [build.const(sign * most, self.wide, what) for sign, what in ((-1, "least"), (1, "most"))]
        clipped = build.op("ClipByValue", total, *limits, what="clipped")
        finite = build.op("IsFinite", total, what="is_finite")
        sent = build.op("SelectV2", finite, clipped, total, what="sent")
        code = build.op("Cast", sent, what="code", DstT=self._wire)
        back = build.op("Cast", code, what="back", DstT=self.wide)
        rest = build.op("Sub", total, back, what="rest")
        self._kept = residual, build.op("SelectV2", finite, rest, residual.before, what="residual")
        return code

    def decoded(self, total: Value) -> Value:
        """Return the sum of the gradients, given that of what was sent."""
        build = self._build
        if self._kept is None and self._exponent:
            total = build.common("Mul", total, build.const(2.0**self._exponent, self.wide, "up"), what="unscaled")
        result = cast(self._context, total, self._fact.dtype, f"{self._value.node.name}/narrow")
        before = after = None
        if self._kept is not None:
            residual, after = self._kept
            before = residual.before
            residual.becomes(after, result)
        self._context.compressed.append(CompressedSum(self._edge, self._seen, before, after, result))
        return result


def largest_of_sum(wire: int, members: int) -> float:
    """Return a number of a type, near the largest of which so many can be added although every sum may round up."""
    largest, bits = LARGEST[wire]
    fraction, exponent = math.frexp(largest / members / (1 + 2.0**-bits) ** (members - 1))
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)


def reduce_cast16(exchange: Exchange, value: Value, fact: Fact) -> Value:
    """Return the sum of a value's instances, which travel in 16 bits.

    Args:
        exchange: the edge that is lowered, with its compressor and keys.
        value: the gradient of each replica.
        fact: of it.
    """
    halved = Cast16(exchange, value, fact)
    build = Builder.of(exchange.context, halved.full, f"{value.node.name}/sum", origin=value.node)
    total = add_cast16(exchange, build, halved.code, halved.wide)
    if exchange.planned.lowered.does(Operation.GATHER):
        shape = build.const(static_shape(fact), dtypes.INT32, "shape")
        total = build.common("Reshape", total, shape, what="unflat")
    return halved.decoded(total)


def add_cast16(exchange: Exchange, build: Builder, code: Value, wide: int) -> Value:
    """Return the sum of 16-bit values in a wider type; where they are gathered, as a vector.

    Args:
        exchange: the edge that is lowered, with its compressor and keys.
        build: where nodes are added.
        code: of each member, in 16 bits.
        wide: number of the sum's type.
    """
    edge, name = exchange.planned, build.name
    if edge.lowered.does(Operation.GATHER):
        return _gathered_sum(exchange, build, code, wide)
    if edge.compressor in FEEDBACK and edge.lowered.is_local:
        return sum_of_members(exchange, build.op("Cast", code, what="widen", DstT=wide), name)
    return cast(exchange.context, sum_of_members(exchange, code, name), wide, f"{name}/widen")


def _gathered_sum(exchange: Exchange, build: Builder, code: Value, wide: int) -> Value:
    """Let every member have all codes, and add them in the wider type."""
    line = build.const([-1], dtypes.INT32, "line")
    sent = build.op("Reshape", code, line, what="flat")
    wire = sent.dtype
    if wire == dtypes.BFLOAT16:  # which gathers do not know
        sent = build.op("Bitcast", sent, what="bits", type=dtypes.HALF)
    every = vectors_of_members(exchange, sent, build.name)
    if wire == dtypes.BFLOAT16:
        every = build.op("Bitcast", every, what="values", type=wire)
    rows = build.const([exchange.members, -1], dtypes.INT32, "rows")
    table = build.op("Reshape", cast(exchange.context, every, wide, f"{build.name}/widen"), rows, what="table")
    return build.op("Sum", table, build.const(0, dtypes.INT32, "axis"), what="total")
