"""Values in the type and shape in which they travel, and back."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.resolve.wire_types import REAL_PARTS, WIDER, can_be_sent

END = 256
"""Stands behind the last byte of a text."""


def cast(rewrite: Rewrite, value: Value, dtype: int, name: str) -> Value:
    """Return the value in another element type.

    Args:
        dtype: number of TensorFlow's type.
        name: of the node, where one is needed.
    """
    if value.dtype == dtype:
        return value
    node = rewrite.add("Cast", [value], Site(name, value.node.span, value.node), attrs={"DstT": dtype})
    return node.output()


def encode(rewrite: Rewrite, value: Value, op: str, name: str) -> Value:
    """Return a value in a type that collectives know: it can be gathered, and combined by `op`, as what it is.

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
    if value.dtype in REAL_PARTS:
        return FoldedBuilder.of(rewrite, value, name).op(
            "Bitcast", value, what="real_parts", type=REAL_PARTS[value.dtype]
        )
    return cast(rewrite, value, WIDER.get(value.dtype, value.dtype), f"{name}/wide")


def decode(rewrite: Rewrite, value: Value, dtype: int, name: str) -> Value:
    """Undo `encode`.

    Args:
        value: what `encode` made, combined.
        dtype: the type before `encode`.
        name: prefix of the node's name.
    """
    if dtype in REAL_PARTS:
        return FoldedBuilder.of(rewrite, value, name).op("Bitcast", value, what="whole", type=dtype)
    return cast(rewrite, value, dtype, f"{name}/code")


def bytes_of_texts(build: FoldedBuilder, texts: Value, longest: Value) -> Value:
    """Return texts as rows of numbers, which collectives know: a number for each byte, then `END` to fill the row.

    Args:
        build: adds the nodes.
        texts: strings of any shape.
        longest: scalar int32, at least 1: how long a row is.
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
        build: adds the nodes.
        rows: numbers; of each row one text is made.
    """
    table = np.array([bytes([byte]) for byte in range(END)] + [b""], object)
    letters = build.rewrite.const(table, object, name=f"{build.name}/letters", near=build.near)
    found = build.op("GatherV2", letters, rows, build.numbers(0, "letters_axis"), what="spelt", batch_dims=0)
    return build.op("ReduceJoin", found, build.numbers(-1, "join_axis"), what="texts")


def flat(rewrite: Rewrite, value: Value) -> Value:
    """Return a vector: its length then says everything about its shape (see `Keys`)."""
    build = FoldedBuilder.of(rewrite, value)
    return build.op("Reshape", value, build.numbers([-1], "line"), what="flat")


def refuse_container(value: Value, fact: Fact, node: Node) -> None:
    """Refuse to combine what has no elements of its own.

    Args:
        value: what is to be combined.
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
