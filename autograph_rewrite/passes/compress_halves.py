"""fp16, bf16 and both with error feedback: a gradient travels in 16 bits.

    fp16       dw ──► * 2^-k ──► half ──► sum ──► float ──► * 2^k          2^k >= N: the sum cannot overflow
    fp16_ef    dw + residual ──► half ──► sum in float                     residual := what the cast took away

Halves with error feedback are added in full precision wherever that costs no more (`compress_choice.GATHERED_UP_TO`).
"""

from __future__ import annotations

import math

import numpy as np

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.added import Added, residual_of
from autograph_rewrite.passes.compress_choice import FEEDBACK, GATHERS, HALVES, static_shape
from autograph_rewrite.passes.compressed import CompressedSum
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.exchange import add_up, contribution, gather_all, members
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.scope import Scope
from autograph_rewrite.plan.parts import EdgePlan

LARGEST = {dtypes.HALF: (65504.0, 11), dtypes.BFLOAT16: (float(np.uint32(0x7F7F0000).view(np.float32)), 8)}
"""The largest finite number of each type, and the bits of its significand."""


class Halved:
    """A gradient on its way in 16 bits: what is sent, and what becomes of the sum.

    Args:
        context: the rewrite.
        value: contributions to a sum, one per replica.
        fact: about it.
        edge: of the plan.

    Attributes:
        full: what one member has.
        code: what one member sends, in the shape of the value.
        wide: the type of the sum.
    """

    def __init__(self, context: Context, value: Value, fact: Fact, edge: EdgePlan) -> None:
        self._context, self._fact, self._edge, self._value = context, fact, edge, value
        self.wide = combine.wire_type(fact.dtype, "sum")
        self._wire = HALVES[edge.compressor]
        self._members = members(context, edge)
        self._kept: tuple[Added, Value] | None = None  # the residual, and what it becomes
        self.full = full = contribution(context, value, fact, edge)
        self._scope = Scope(context, full, f"{value.node.name}/compress", origin=value.node)
        self.code = self._with_feedback(full) if edge.compressor in FEEDBACK else self._scaled(full)

    @property
    def _exponent(self) -> int:
        """The power of two that keeps the sum of all members within the type; bfloat16 is as wide as float32."""
        return math.ceil(math.log2(self._members)) if self._wire == dtypes.HALF else 0

    def _scaled(self, full: Value) -> Value:
        scope = self._scope
        if self._exponent:
            full = scope.each("Mul", full, scope.const(2.0**-self._exponent, self.wide, "down"), what="scaled")
        return scope.each("Cast", full, what="code", DstT=self._wire)

    def _with_feedback(self, full: Value) -> Value:
        """Send as much of gradient and residual as the type holds; NaN and infinity go through."""
        scope = self._scope
        residual = residual_of(self._context, full, self._fact, self._edge)
        total = scope.each("AddV2", full, residual.before, what="total")
        most = largest_of_sum(self._wire, self._members)
        limits = [scope.const(sign * most, self.wide, what) for sign, what in ((-1, "least"), (1, "most"))]
        clipped = scope.each("ClipByValue", total, *limits, what="clipped")
        finite = scope.each("IsFinite", total, what="is_finite")
        sent = scope.each("SelectV2", finite, clipped, total, what="sent")
        code = scope.each("Cast", sent, what="code", DstT=self._wire)
        back = scope.each("Cast", code, what="back", DstT=self.wide)
        rest = scope.each("Sub", total, back, what="rest")
        self._kept = residual, scope.each("SelectV2", finite, rest, residual.before, what="residual")
        return code

    def decoded(self, total: Value) -> Value:
        """Return the sum of the gradients, given that of what was sent."""
        scope = self._scope
        if self._kept is None and self._exponent:
            total = scope.common("Mul", total, scope.const(2.0**self._exponent, self.wide, "up"), what="unscaled")
        result = combine.cast(self._context, total, self._fact.dtype, f"{self._value.node.name}/narrow")
        before = after = None
        if self._kept is not None:
            residual, after = self._kept
            before = residual.before
            residual.becomes(after, result)
        self._context.compressed.append(CompressedSum(self._edge, self._value, before, after, result))
        return result


def largest_of_sum(wire: int, members: int) -> float:
    """Return a number of a type, near the largest of which so many can be added although every sum may round up."""
    largest, bits = LARGEST[wire]
    fraction, exponent = math.frexp(largest / members / (1 + 2.0**-bits) ** (members - 1))
    return math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)


def reduce_halves(context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys) -> Value:
    """Return the sum of a value's instances, which travel in 16 bits."""
    halved = Halved(context, value, fact, edge)
    scope = Scope(context, halved.full, f"{value.node.name}/sum", origin=value.node)
    total = add_halves(scope, halved.code, edge, keys, halved.wide)
    if edge.lowering in GATHERS.values():
        shape = scope.const(static_shape(fact), dtypes.INT32, "shape")
        total = scope.common("Reshape", total, shape, what="unflat")
    return halved.decoded(total)


def add_halves(scope: Scope, code: Value, edge: EdgePlan, keys: Keys, wide: int) -> Value:
    """Return the sum of 16-bit values in a wider type; where they are gathered, as a vector."""
    if edge.lowering in GATHERS.values():
        return _gathered_sum(scope, code, edge, keys, wide)
    if edge.compressor in FEEDBACK and edge.lowering == "add_n":
        back = scope.each("Cast", code, what="widen", DstT=wide)
        return scope.gather("AddN", back, what="add_n")
    return combine.cast(scope.context, add_up(scope, code, edge, keys), wide, f"{scope.name}/widen")


def _gathered_sum(scope: Scope, code: Value, edge: EdgePlan, keys: Keys, wide: int) -> Value:
    """Let every member have all codes, and add them in the wider type."""
    context = scope.context
    line = scope.const([-1], dtypes.INT32, "line")
    sent = scope.each("Reshape", code, line, what="flat")
    wire = sent.dtype
    if wire == dtypes.BFLOAT16:  # which gathers do not know
        sent = scope.each("Bitcast", sent, what="bits", type=dtypes.HALF)
    every = gather_all(scope, sent, edge, keys)
    if wire == dtypes.BFLOAT16:
        every = scope.each("Bitcast", every, what="values", type=wire)
    rows = scope.const([members(context, edge), -1], dtypes.INT32, "rows")
    table = scope.each("Reshape", combine.cast(context, every, wide, f"{scope.name}/widen"), rows, what="table")
    return scope.each("Sum", table, scope.const(0, dtypes.INT32, "axis"), what="total")
