"""Define the interface of a codec, which encodes a member's gradient and decodes the codes of all members.

    t = dw + residual ──encode──► code ──exchange──► codes of all ──decode──► sum      residual := t - decode(code)

A codec is data and two functions. Common code for all codecs does the rest: error feedback, buckets and the exchange
(`passes.compression`), the choice of gradients (`resolve.compression`), the price (`cost`) and the check of the sums
(`ar.verify`).

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
    """The gradient of one member.

    Attributes:
        value: its contribution, plus its residual if there is error feedback; in the type of the sum.
        shape: of the gradient; the value may have the same elements in another shape.
        dtype: number of the type of the sum.
        members: how many contributions are added up.
        state: the codec's state (`Codec.state`) from the last step, by name.
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
    """The cost of encoding and decoding, for `simulate`.

    Attributes:
        passes: how often the gradient could be read in the same time.
        memory: copies of the gradient that are alive meanwhile.
        ops: how many ops each replica starts.
        sorts: whether it is sorted.
    """

    passes: float = 4.0
    memory: float = 0.0
    ops: int = 1
    sorts: bool = False


class Nodes(Protocol):
    """Adds nodes to the graph (`passes.base.builder.Builder`)."""

    def op(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node on the device of the gradient; return its first output.

        Args:
            what: the last part of its name, after the codec's name.
            **attrs: attributes that do not follow from the op and its inputs.
        """

    def common(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node as `op` does, on operands that are equal on all members."""

    def const(self, content: Any, dtype: int, what: str) -> Value:
        """Add a constant of a number or nested lists of them; `dtype` is the number of TensorFlow's type."""

    def numbers(self, content: Any, what: str) -> Value:
        """Add a constant of int32."""


class Codec:
    """A smaller form of a gradient; a user's codec overrides `codes`, `encode` and `decode`.

    Attributes:
        error_feedback: keep the part that encoding loses, and send it in later steps.
        adds: codes may be added: the sum of two codes decodes to the sum of both gradients. Else all members receive
            all codes.
        elementwise: there is one code, with an element for each element of the gradient, so that several gradients may
            share one exchange; encoding and decoding keep the shape.
        gather_up_to: up to this many members, codes that may be added are gathered instead, and added after decoding,
            without loss.
        spreads: an element that is not finite makes other elements not finite.
        added_bits: bits of the significand in which codes are added; None: the precision of the type of the sum.
    """

    error_feedback = True
    adds = False
    elementwise = False
    gather_up_to = 0
    spreads = False
    added_bits: int | None = None
    price = Price()

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return the tensors that a member sends of a gradient.

        Args:
            dtype: number of the type of the sum.
        """
        raise NotImplementedError

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Return the tensors that one member sends, of the types and shapes of `codes`."""
        raise NotImplementedError

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Return the decoded gradients, in the type of the sum.

        Args:
            gradient: that of this member, before encoding.
            codes: the sum of codes that may be added; else the gathered codes, each with the senders as a new first
                dimension, which the result has as well.
        """
        raise NotImplementedError

    def decode_sum(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Return the sum of the decoded gradients; the senders are the first dimension of each code."""
        each = self.decode(build, gradient, codes)
        return build.op("Sum", each, build.numbers(0, "senders"), what="total")

    def obstacle(self, shape: Shape) -> str:
        """Return why a gradient of this shape cannot be encoded; "": it can."""
        return ""

    # Only codecs with several exchanges, or with state besides the residual, override these.

    def rounds(self, shape: Shape, dtype: int) -> tuple[tuple[Code, ...], ...]:
        """Return the tensors that a member sends in each exchange.

        Only the last exchange carries contributions to the sum. The earlier ones give all members the same values, so
        `decode` is linear in the last code.
        """
        return (self.codes(shape, dtype),)

    def encode_round(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> tuple[Value, ...]:
        """Return the tensors that one member sends in an exchange; `received` has the results of earlier ones."""
        return self.encode(build, gradient)

    def receive(self, build: Nodes, gradient: Gradient, total: Value) -> Value:
        """Return the result of an exchange that is not the last, computed from the sum of its codes."""
        return total

    def state(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the names and shapes of the tensors kept between steps besides the residual; they start at zero."""
        return {}

    def update(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> Mapping[str, Value]:
        """Return the new state; `received` has the results of all exchanges."""
        return {}

    # `ar.verify` checks these properties, in numpy.

    def most_kept(self, total: Array, members: int) -> float:
        """Return the largest norm that a residual may have after a step.

        Args:
            total: contribution plus residual of one member before the step.
        """
        return float(np.linalg.norm(total.ravel()))

    def sent(self, gradient: Array, members: int) -> Array | None:
        """Return a member's gradient as decoded from its code; `ar.verify` compares sums without error feedback."""
        return None


def kept_back(shape: Shape, dtype: int, codec: Codec) -> int:
    """Return the bytes of the state that a codec keeps on each replica, besides the residual."""
    return sum(math.prod(one) for one in codec.state(shape).values()) * dtypes.width(dtype)


def round_bytes(codes: Sequence[Code]) -> int:
    """Return the bytes of codes as they are sent, each in whole words of `wire_word`."""
    word = wire_word(codes)
    return sum(-(-one.count * dtypes.width(one.dtype) // word) * word for one in codes)


def wire_word(codes: Sequence[Code]) -> int:
    """Return the bytes of the words in which codes are sent together: 2 if all are halves, else 4."""
    return 2 if all(dtypes.width(one.dtype) == 2 for one in codes) else 4
