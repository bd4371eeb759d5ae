"""Codes as they travel: the bits of several tensors behind each other, as whole numbers that collectives know.

values float32[k], positions int32[k]   ──►   int32[2 k] ──gather──►  [members, 2 k]  ──►  [members, k], [members, k]
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.codecs.codec import Code, wire_word
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import Builder

_WORDS = {2: dtypes.HALF, 4: dtypes.INT32}
"""By the bytes of a word, the type as which it travels."""


def pack(build: Builder, tensors: Sequence[Value], codes: Sequence[Code]) -> Value:
    """Return the bits of some tensors as one vector.

    Args:
        build: adds nodes.
        tensors: of fixed shapes.
        codes: their types and shapes.
    """
    word = wire_word(codes)
    parts = [_words(build, tensor, code, word, i) for i, (tensor, code) in enumerate(zip(tensors, codes, strict=True))]
    if len(parts) == 1:
        return parts[0]
    return build.op("ConcatV2", *parts, build.numbers(0, "join"), what="sent", N=len(parts))


def unpack(build: Builder, every: Value, codes: Sequence[Code], members: int) -> list[Value]:
    """Return the tensors that all members have sent, each with the senders as a first dimension.

    Args:
        build: adds nodes.
        every: what they have sent, one behind the other.
        codes: types and shapes of what each has sent.
        members: how many they are.
    """
    word = wire_word(codes)
    sizes = [-(-code.count * dtypes.width(code.dtype) // word) for code in codes]
    table = build.op("Reshape", every, build.numbers([members, -1], "rows"), what="table")
    if len(codes) == 1:
        return [_tensor(build, table, codes[0], members, 0)]
    axis = build.numbers(1, "columns")
    parts = build.op("SplitV", table, build.numbers(sizes, "sizes"), axis, what="parts", num_split=len(codes)).node
    return [_tensor(build, parts.output(i), code, members, i) for i, code in enumerate(codes)]


def _words(build: Builder, tensor: Value, code: Code, word: int, i: int) -> Value:
    """Return the bits of one tensor as a vector of words, the last filled with zeros."""
    width, what = dtypes.width(code.dtype), f"words_{i}"
    flat = build.op("Reshape", tensor, build.numbers([-1], f"{what}_line"), what=f"{what}_flat")
    if code.dtype == _WORDS[word]:
        return flat
    if code.dtype == dtypes.BOOL:  # which has no bits to Bitcast
        flat = build.op("Cast", flat, what=f"{what}_bytes", DstT=dtypes.UINT8)
    if width < word:
        each = word // width
        missing = build.numbers([[0, -code.count % each]], f"{what}_missing")
        filled = build.op("Pad", flat, missing, what=f"{what}_filled")
        flat = build.op("Reshape", filled, build.numbers([-1, each], f"{what}_each"), what=f"{what}_rows")
    bits = build.op("Bitcast", flat, what=what, type=_WORDS[word])
    return bits if width <= word else build.op("Reshape", bits, build.numbers([-1], f"{what}_all"), what=f"{what}_sent")


def _tensor(build: Builder, words: Value, code: Code, members: int, i: int) -> Value:
    """Return what the words of all members, [members, n], are the bits of."""
    width, word, what = dtypes.width(code.dtype), dtypes.width(words.dtype), f"code_{i}"
    if width > word:
        split = build.numbers([members, -1, width // word], f"{what}_each")
        words = build.op("Reshape", words, split, what=f"{what}_words")
    kind = dtypes.UINT8 if code.dtype == dtypes.BOOL else code.dtype
    found = words if kind == words.dtype else build.op("Bitcast", words, what=what, type=kind)
    if width < word:
        found = build.op("Reshape", found, build.numbers([members, -1], f"{what}_line"), what=f"{what}_flat")
        begin, size = build.numbers([0, 0], f"{what}_begin"), build.numbers([members, code.count], f"{what}_size")
        found = build.op("Slice", found, begin, size, what=f"{what}_sent")
    if kind != code.dtype:
        found = build.op("Cast", found, what=f"{what}_flags", DstT=code.dtype)
    if len(code.shape) == 1:
        return found
    return build.op("Reshape", found, build.numbers([members, *code.shape], f"{what}_shape"), what=f"{what}_all")
