"""Damage: what random bits, another editor, or somebody who means it, do to a file."""

from __future__ import annotations

import io
import random
import re
import zipfile
from collections.abc import Callable

BYTES = (
    b"\x00",
    b"\xff",
    b"\x0a",
    b"\x80\x80\x80\x80\x08",
    b"\xff" * 9 + b"\x01",
    b"\x1b[2J\x1b]0;x\x07",
    b"\xc2\x9b31m",
)
WORDS = (
    *(
        "-1",
        "0",
        "1e308",
        "nan",
        "-inf",
        "99999999999999999999",
        "2147483648",
        "0x7fffffffffffffff",
        "null",
        "true",
        "~",
    ),
    *(
        "[]",
        "{}",
        "[[[[[[[[",
        "{a: {a: {a: ",
        "'",
        '"',
        "\\",
        "%",
        "%x",
        "^train",
        "loss:0",
        "!!python/object:os.system",
    ),
    *(
        "&a [*a, *a]",
        "*a",
        "<<: *a",
        "\x1b[31m",
        "\u202e",
        "\u0000",
        "é" * 300,
        "(" * 500,
        "a" * 5000,
        "../../etc/passwd",
    ),
    *("(a+)+b", "(?:a|a)*$", "/dev/zero", "float32[?,3]", "split(99)", "DT_RESOURCE", "CPU:99999999", "int_val: 1"),
)
MOST = 2**22
"""Bytes of a damaged file."""


def mutated(data: bytes, seed: int) -> bytes:
    """Return damaged bytes; equal seeds do the same damage.

    Args:
        data: of a whole file.
        seed: of the dice.
    """
    dice = random.Random(seed)
    if data.startswith(b"PK") and dice.random() < 0.8:  # its checksums would refuse nearly everything
        return _of_archive(data, dice)
    is_text = b"\0" not in data and all(byte >= 9 for byte in data[:2000])
    kinds = (*_EITHER, *_TEXT, *_TEXT) if is_text else (*_EITHER, *_BINARY, *_BINARY)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        data = dice.choice(kinds)(data, dice)[:MOST] or b"\n"
    return data


def _of_archive(data: bytes, dice: random.Random) -> bytes:
    """Damage one member of an archive."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(packed, "w") as target:
        chosen = dice.choice(source.namelist())
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, mutated(content, dice.randrange(2**30)) if name == chosen else content)
    return packed.getvalue()


def _at(data: bytes, dice: random.Random) -> int:
    return dice.randrange(len(data)) if data else 0


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 2, 10))):
        changed[_at(data, dice)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, dice: random.Random) -> bytes:
    at, new = _at(data, dice), dice.choice(BYTES)
    return data[:at] + new + data[at + len(new) :]


def _insert(data: bytes, dice: random.Random) -> bytes:
    at = _at(data, dice)
    return data[:at] + dice.choice(BYTES) * dice.choice((1, 1, 50, 20_000)) + data[at:]


def _cut(data: bytes, dice: random.Random) -> bytes:
    at = _at(data, dice)
    return data[:at] + data[at + dice.choice((1, 4, 40, 400)) :]


def _truncate(data: bytes, dice: random.Random) -> bytes:
    return data[: _at(data, dice)]


def _double(data: bytes, dice: random.Random) -> bytes:
    at, size = _at(data, dice), dice.choice((4, 40, 400, 4000))
    return data[: at + size] + data[at : at + size] * dice.choice((1, 1, 30)) + data[at + size :]


def _move(data: bytes, dice: random.Random) -> bytes:
    at, to, size = _at(data, dice), _at(data, dice), dice.choice((1, 8, 80))
    return data[:to] + data[at : at + size] + data[to + size :]


def _strings(data: bytes, dice: random.Random) -> bytes:
    """Put one name of a binary file in the place of another of the same length, or of any."""
    found = [match.span() for match in re.finditer(rb"[A-Za-z_][\w/:^.]{2,40}", data)]
    if len(found) < 2:
        return _flip(data, dice)
    one, other = dice.choice(found), dice.choice(found)
    same = [span for span in found if span[1] - span[0] == one[1] - one[0]]
    other = dice.choice(same) if dice.random() < 0.7 else other
    return data[: one[0]] + data[other[0] : other[1]] + data[one[1] :]


def _word(data: bytes, dice: random.Random) -> bytes:
    """Put a strange word in the place of one."""
    found = [match.span() for match in re.finditer(rb"[\w.\-/%^:]+", data)]
    start, end = dice.choice(found) if found else (0, 0)
    return data[:start] + dice.choice(WORDS).encode() * dice.choice((1, 1, 1, 200)) + data[end:]


def _word_of_another_place(data: bytes, dice: random.Random) -> bytes:
    found = [match.span() for match in re.finditer(rb"[\w.\-/%^:]+", data)]
    if not found:
        return _flip(data, dice)
    one, other = dice.choice(found), dice.choice(found)
    return data[: one[0]] + data[other[0] : other[1]] + data[one[1] :]


def _line(data: bytes, dice: random.Random) -> bytes:
    """Leave out, double, or indent a line."""
    lines = data.split(b"\n")
    at = dice.randrange(len(lines))
    done: Callable[[list[bytes]], list[bytes]] = dice.choice(
        (
            lambda one: [],
            lambda one: one * 2,
            lambda one: [b"  " + one[0]],
            lambda one: one * min(3000, MOST // (len(one[0]) + 1) + 1),
        )
    )
    return b"\n".join([*lines[:at], *done(lines[at : at + 1]), *lines[at + 1 :]])


def _nest(data: bytes, dice: random.Random) -> bytes:
    at, depth = _at(data, dice), dice.choice((20, 2000, 100_000))
    return data[:at] + dice.choice((b"[", b"{", b"(", b"- ", b"a: ", b"{a: ")) * depth + data[at:]


_EITHER = (_flip, _overwrite, _insert, _cut, _truncate, _double, _move)
_BINARY = (_strings, _strings, _strings)
_TEXT = (_word, _word, _word_of_another_place, _word_of_another_place, _line, _nest)
