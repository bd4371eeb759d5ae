"""A codec: what one member sends of its gradient, and what everything that was sent decodes to.

    t = dw + residual ──encode──► code ──exchange──► codes of all ──decode──► sum      residual := t - decode(code)

A codec is data and two functions; the rest is done for every codec alike: error feedback, buckets, the exchange itself
(`passes.compression`), which gradients it is for (`resolve.compression`), what it costs (`cost`) and the check of its
sums (`ar.verify`).

Error feedback: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes (2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.value import Value

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Code:
    """One tensor that a member sends: its element type (a number of `ir.types.dtypes`) and its shape."""

    dtype: int
    shape: Shape

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Gradient:
    """What one member has to send.

    Attributes:
        value: its contribution, plus its residual where there is error feedback; in the type of the sum.
        shape: of the gradient; the value may have the same elements in another shape.
        dtype: number of the type of the sum.
        members: how many contributions are added up.
        state: what the codec has kept since the last step, by name.
    """

    value: Value
    shape: Shape
    dtype: int
    members: int
    state: Mapping[str, Value] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Price(NamedTuple):
    """What encoding and decoding take, for `simulate`.

    Attributes:
        passes: how often the gradient could be read in the same time.
        memory: copies of it that are alive meanwhile.
        ops: that each replica starts for it.
        sorts: whether it is sorted.
    """

    passes: float = 4.0
    memory: float = 0.0
    ops: int = 1
    sorts: bool = False


class Nodes(Protocol):
    """What adds nodes to the graph (`passes.base.builder.Builder`)."""

    def op(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node where the gradient is; return its first output.

        Args:
            what: its name behind the codec's.
            **attrs: what the op and its inputs do not say already.
        """

    def common(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node as `op` does, which works on what all members have alike."""

    def const(self, content: Any, dtype: int, what: str) -> Value:
        """Add a constant of a number or nested lists of them; `dtype` is the number of TensorFlow's type."""

    def numbers(self, content: Any, what: str) -> Value:
        """Add a constant of int32."""


class Codec:
    """Sends less of a gradient than there is; for one of your own, say `codes`, `encode` and `decode`.

    Attributes:
        error_feedback: what encoding takes away is kept, and sent in later steps.
        adds: codes may be added: the sum of two decodes to the sum of both. Else every member is sent all codes.
        elementwise: there is one code, with an element for each of the gradient, so several gradients may be one; what
            is encoded and decoded keeps its shape.
        gather_up_to: among so few members codes that may be added are gathered all the same, and added once they are
            decoded, which loses nothing.
        spreads: one element that is not finite makes others so.
        added_bits: of the significand in which codes are added; None: as exactly as the type of the sum.
    """

    error_feedback = True
    adds = False
    elementwise = False
    gather_up_to = 0
    spreads = False
    added_bits: int | None = None
    price = Price()

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return what a member sends of a gradient.

        Args:
            dtype: number of the type of the sum.
        """
        raise NotImplementedError

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Return what one member sends: tensors as `codes` says."""
        raise NotImplementedError

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Return the gradients that codes stand for, in the type of the sum.

        Args:
            gradient: one of them, as it was before.
            codes: where codes are added, their sum; else each of them with a dimension more in front, the senders,
                which the result has as well.
        """
        raise NotImplementedError

    def decode_sum(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Return the sum of the gradients that gathered codes, with the senders in front, stand for."""
        each = self.decode(build, gradient, codes)
        return build.op("Sum", each, build.numbers(0, "senders"), what="total")

    def obstacle(self, shape: Shape) -> str:
        """Return what stands against encoding a gradient of this shape; "": nothing."""
        return ""

    # What only codecs of several exchanges, or with a state of their own, need.

    def rounds(self, shape: Shape, dtype: int) -> tuple[tuple[Code, ...], ...]:
        """Return what a member sends in each exchange: of several, only the last gives contributions.

        The earlier ones agree on something that all members then have, so `decode` is linear in the last code.
        """
        return (self.codes(shape, dtype),)

    def encode_round(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> tuple[Value, ...]:
        """Return what one member sends in an exchange; `received` is what the earlier ones gave."""
        return self.encode(build, gradient)

    def receive(self, build: Nodes, gradient: Gradient, total: Value) -> Value:
        """Return what is made of the sum of the codes of an exchange behind which another one follows."""
        return total

    def state(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the names and shapes of what is kept from step to step, zero at first, besides the residual."""
        return {}

    def update(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> Mapping[str, Value]:
        """Return what becomes of that state; `received` is what all exchanges gave."""
        return {}

    # What `ar.verify` holds it to, in numpy.

    def most_kept(self, total: Array, members: int) -> float:
        """Return the largest norm that a residual may have after a step.

        Args:
            total: contribution and residual with which one member began.
        """
        return float(np.linalg.norm(total.ravel()))

    def sent(self, gradient: Array, members: int) -> Array | None:
        """Return what the code of a member's gradient stands for; without error feedback sums are compared with it."""
        return None


def kept_back(shape: Shape, dtype: int, codec: Codec) -> int:
    """Return the bytes of what a codec keeps from step to step on each replica, besides the residual."""
    return sum(math.prod(one) for one in codec.state(shape).values()) * dtypes.width(dtype)


def round_bytes(codes: Sequence[Code]) -> int:
    """Return how many bytes codes are as they travel: in whole words, unless all are halves."""
    word = wire_word(codes)
    return sum(-(-one.count * dtypes.width(one.dtype) // word) * word for one in codes)


def wire_word(codes: Sequence[Code]) -> int:
    """Return the bytes of the numbers as which codes travel together."""
    return 2 if all(dtypes.width(one.dtype) == 2 for one in codes) else 4
