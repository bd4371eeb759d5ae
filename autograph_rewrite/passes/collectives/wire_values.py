"""Convert values to the type and shape in which they are sent, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.resolve.compression import static_shape
from autograph_rewrite.resolve.wire_types import REAL_PARTS, WIDER, can_be_sent

END = 256
"""Fills a row after the last byte of a text."""


def cast(rewrite: Rewrite, value: Value, dtype: int, name: str) -> Value:
    """Return the value in another element type.

    Args:
        dtype: number of TensorFlow's type.
        name: of the node, if one is needed.
    """
    if value.dtype == dtype:
        return value
    node = rewrite.add("Cast", [value], Site(name, value.node.span, value.node), attrs={"DstT": dtype})
    return node.output()


def encode(rewrite: Rewrite, value: Value, op: str, name: str) -> Value:
    """Return a value in a type that collectives can gather, or combine by `op`, with the same result.

    Args:
        op: how it will be combined, or "gather".
        name: prefix of the node's name.

    Raises:
        PassError: there is no such type.
    """
    if not can_be_sent(value.dtype, op):
        raise PassError(
            f"'{value.name}' is {dtypes.dtype_name(value.dtype)}, which cannot travel between processes ({op})",
            node=value.node,
            hint="convert it to numbers before it has to be whole, or leave it to each process: batch_inputs",
        )
    build = FoldedBuilder.of(rewrite, value, name)
    if value.dtype in REAL_PARTS:
        return build.op("Bitcast", value, what="real_parts", type=REAL_PARTS[value.dtype])
    if value.dtype == dtypes.BFLOAT16 and op == "gather":  # no kernel gathers it: its bits are sent as half
        return build.op("Bitcast", value, what="bits", type=dtypes.HALF)
    return cast(rewrite, value, WIDER.get(value.dtype, value.dtype), f"{name}/wide")


def decode(rewrite: Rewrite, value: Value, dtype: int, name: str) -> Value:
    """Undo `encode`.

    Args:
        value: the encoded values, combined.
        dtype: the type before `encode`.
        name: prefix of the node's name.
    """
    if dtype in REAL_PARTS:
        return FoldedBuilder.of(rewrite, value, name).op("Bitcast", value, what="whole", type=dtype)
    if (value.dtype, dtype) == (dtypes.HALF, dtypes.BFLOAT16):
        return FoldedBuilder.of(rewrite, value, name).op("Bitcast", value, what="as_it_was", type=dtype)
    return cast(rewrite, value, dtype, f"{name}/code")


def bytes_of_texts(build: FoldedBuilder, texts: Value, longest: Value) -> Value:
    """Return texts as rows of numbers, which can be sent: a number for each byte, then `END` to fill the row.

    Args:
        texts: strings of any shape.
        longest: scalar int32, at least 1: the length of a row.
    """
    raw = build.op("DecodePaddedRaw", texts, longest, what="bytes", out_type=dtypes.UINT8)
    numbers = build.op("Cast", raw, what="numbers", DstT=dtypes.INT32)
    last = build.numbers(-1, "last_axis")
    lengths = build.op("ExpandDims", build.op("StringLength", texts, what="lengths"), last, what="ends")
    places = build.op("Range", build.numbers(0, "first"), longest, build.numbers(1, "next"), what="places_of_bytes")
    is_byte = build.op("Less", places, lengths, what="is_byte")
    return build.op("SelectV2", is_byte, numbers, build.numbers(END, "end"), what="filled")


def texts_of_bytes(build: FoldedBuilder, rows: Value) -> Value:
    """Undo `bytes_of_texts`.

    Args:
        rows: numbers; each row becomes one text.
    """
    table = np.array([bytes([byte]) for byte in range(END)] + [b""], object)
    letters = build.rewrite.const(table, object, name=f"{build.name}/letters", near=build.near)
    found = build.op("GatherV2", letters, rows, build.numbers(0, "letters_axis"), what="spelt", batch_dims=0)
    return build.op("ReduceJoin", found, build.numbers(-1, "join_axis"), what="texts")


def flat(rewrite: Rewrite, value: Value) -> Value:
    """Return a value as a vector: its size then determines its shape, as `Keys` needs."""
    build = FoldedBuilder.of(rewrite, value)
    return build.op("Reshape", value, build.numbers([-1], "line"), what="flat")


def refuse_container(value: Value, fact: Fact, node: Node) -> None:
    """Refuse to combine containers.

    Args:
        value: the value that would be combined.
        node: the reader.

    Raises:
        PassError: the value is a list, a handle or another container.
    """
    if fact.dtype in (dtypes.VARIANT, dtypes.RESOURCE):
        raise PassError(
            f"'{node.name}' needs the whole of '{value.name}', a container whose elements live on different replicas",
            node=node,
            hint="stack the list into a tensor before this op, or name the input that feeds it in batch_inputs as None",
        )


# Pack several values of fixed shapes into one vector, and back: Concat(flat %a, flat %b) ... SplitV ──► a, b.
#
# Vectors of other passes may follow them, and are returned as they are.


class Packing:
    """The layout of some values in one vector; one value alone stays as it is.

    Args:
        values: original values of fixed shapes; the packed ones replace them.
        name: prefix of the names of new nodes.
        behind: the lengths of the vectors that follow them.
    """

    def __init__(self, rewrite: Rewrite, values: Sequence[Value], name: str, behind: Sequence[int] = ()) -> None:
        self._rewrite, self._values, self._name = rewrite, values, name
        self.shapes = [*(static_shape(rewrite.fact(value)) for value in values), *((length,) for length in behind)]
        if len(self.shapes) > 1:
            self._line = rewrite.const([-1], np.int32, name=f"{name}/line", near=values[0])
            self._axis = rewrite.const(0, np.int32, name=f"{name}/axis", near=values[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed value."""
        return self.shapes[0] if len(self.shapes) == 1 else (sum(map(math.prod, self.shapes)),)

    def join(self, parts: Sequence[Value]) -> Value:
        """Return values of these shapes, all of one span, as one."""
        if len(parts) == 1:
            return parts[0]
        flat = [self._builder(part, part).op("Reshape", part, self._line, what="flat") for part in parts]
        build = self._builder(parts[0], self._values[0])
        return build.op("ConcatV2", *flat, self._axis, what="concat", N=len(flat))

    def split(self, joined: Value, like: Value) -> list[Value]:
        """Return the parts of a joined value, in their shapes.

        Args:
            joined: all elements, in order.
            like: a value that runs as often.
        """
        whole = [joined]
        if len(self.shapes) > 1:
            build = self._builder(like, self._values[0])
            sizes = build.numbers([math.prod(shape) for shape in self.shapes], "sizes")
            parts = build.op("SplitV", joined, sizes, self._axis, what="split", num_split=len(self.shapes)).node
            whole = [parts.output(i) for i in range(len(self.shapes))]
        count = len(self._values)
        values = zip(whole[:count], self._values, self.shapes[:count], strict=True)
        return [*(self._shaped(*one, like) for one in values), *whole[count:]]

    def _shaped(self, part: Value, value: Value, shape: Sequence[int], like: Value) -> Value:
        operand = self._rewrite.const(list(shape), np.int32, name=f"{value.node.name}/shape", near=value)
        return self._builder(like, value).op("Reshape", part, operand, what="whole")

    def _builder(self, like: Value, origin: Value) -> FoldedBuilder:
        return FoldedBuilder.of(self._rewrite, self._values[0], self._name, span=like.node.span, origin=origin.node)
