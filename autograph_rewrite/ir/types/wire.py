"""Reads and writes the GraphDef wire format field by field.

    bytes ──read_node──► RawNode(name, op, inputs, device, attrs, rest) ──write_node──► bytes

Attribute values stay raw bytes until a caller decodes one: most passes never look, a round trip is exact, and equal
values have equal cache keys.
Format: https://protobuf.dev/programming-guides/encoding, node_def.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

LENGTH_DELIMITED = 2
NODE, LIBRARY, VERSION, VERSIONS = 1, 2, 3, 4  # GraphDef
NAME, OP, INPUT, DEVICE, ATTR = 1, 2, 3, 4, 5  # NodeDef


class RawNode(NamedTuple):
    """A NodeDef whose attributes are still encoded; `rest` holds the uninterpreted fields."""

    name: str
    op: str
    inputs: list[str]
    device: str
    attrs: dict[str, bytes]
    rest: bytes


def varint(value: int) -> bytes:
    """Encode an unsigned integer."""
    if value < 0x80:
        return SMALL[value]
    if value < 0x4000:  # the length of almost every node
        return bytes((value & 0x7F | 0x80, value >> 7))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


SMALL = tuple(bytes((i,)) for i in range(128))


def delimited(field: int, payload: bytes) -> bytes:
    """Encode one length-delimited field (string, bytes or message)."""
    return varint(field << 3 | LENGTH_DELIMITED) + varint(len(payload)) + payload


_BITS = 70
"""Seven from each of the ten bytes that a 64-bit number takes."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at `at` and the position after it."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while shift < _BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number has more than 64 bits")


def fields(data: bytes, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield `(field, wire type, start of tag, start of payload, end)` for each field of a message.

    Args:
        data: an encoded message, or more around it.
        at: offset of its first byte.
        end: offset after its last byte; None: the end of `data`.
    """
    end = len(data) if end is None else end
    while at < end:
        tag_at = at
        tag, at = read_varint(data, at)
        if tag < 8:
            raise ValueError("a field has the number 0")
        wire = tag & 7
        if wire == LENGTH_DELIMITED:
            size, at = read_varint(data, at)
            stop = at + size
        elif wire == 0:
            _, stop = read_varint(data, at)
        elif wire == 5:
            stop = at + 4
        elif wire == 1:
            stop = at + 8
        else:
            raise ValueError(f"unsupported wire type {wire}")
        if stop > end:
            raise ValueError("a field runs past the end of its message")
        yield tag >> 3, wire, tag_at, at, stop
        at = stop


def _read_attr(data: bytes, at: int, end: int) -> tuple[str, bytes]:
    key, value = "", b""
    for field, _, _, start, stop in fields(data, at, end):
        if field == 1:
            key = str(data[start:stop], "utf-8")
        elif field == 2:
            value = data[start:stop]
    return key, value


def read_node(
    data: bytes, at: int = 0, end: int | None = None, entries: dict[bytes, tuple[str, bytes]] | None = None
) -> RawNode:
    """Decode one NodeDef. This is the hot loop of loading, so tags are compared as whole bytes.

    Args:
        entries: a cache of decoded attributes by their bytes, so that nodes share equal attributes.
    """
    end = len(data) if end is None else end
    entries = {} if entries is None else entries
    name = op = device = ""
    inputs: list[str] = []
    attrs: dict[str, bytes] = {}
    rest: list[bytes] = []
    while at < end:
        tag = data[at]
        if tag not in _NODE_TAGS:
            field = next(fields(data, at, end))
            rest.append(data[at : field[4]])
            at = field[4]
            continue
        size = data[at + 1]
        at += 2
        if size >= 0x80:
            size, at = read_varint(data, at - 1)
        stop = at + size
        if stop > end:
            raise ValueError("a field runs past the end of its NodeDef")
        if tag == 0x2A:
            entry = data[at:stop]
            known = entries.get(entry)
            if known is None:
                known = entries[entry] = _read_attr(data, at, stop)
            attrs[known[0]] = known[1]
        elif tag == 0x1A:
            inputs.append(str(data[at:stop], "utf-8"))
        elif tag == 0x0A:
            name = str(data[at:stop], "utf-8")
        elif tag == 0x12:
            op = str(data[at:stop], "utf-8")
        else:
            device = str(data[at:stop], "utf-8")
        at = stop
    return RawNode(name, op, inputs, device, attrs, b"".join(rest))


_NODE_TAGS = frozenset((0x0A, 0x12, 0x1A, 0x22, 0x2A))


def write_attrs(attrs: Mapping[str, bytes]) -> bytes:
    """Encode the attribute map of a NodeDef, in the order of the mapping."""
    return b"".join([delimited(ATTR, delimited(1, key.encode()) + delimited(2, value)) for key, value in attrs.items()])


def write_node(name: bytes, op: bytes, inputs: Iterable[bytes], device: bytes, tail: bytes) -> bytes:
    """Encode one NodeDef as a `node` field of GraphDef; `tail` is its attributes and uninterpreted fields.

    Args:
        name: UTF-8, like all text here.
        inputs: as NodeDef spells them (`name`, `name:1`, `^name`).
        device: b"" for none.
    """
    body = [b"\n", varint(len(name)), name, b"\x12", varint(len(op)), op]
    for text in inputs:
        body += (b"\x1a", varint(len(text)), text)
    if device:
        body += (b"\x22", varint(len(device)), device)
    body.append(tail)
    payload = b"".join(body)
    return b"\n" + varint(len(payload)) + payload
