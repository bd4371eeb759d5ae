r"""Wrap the output streams of the command line: they survive a closed pipe, and escape control characters.

    rewrite GRAPH -o OUT --print-changed | head      OUT is still written, and the exit code is that of the verb
    dump GRAPH                                       a node called ESC[2J is printed as \x1b[2J

Names in graphs may be hostile. Verbs print plain text, so every control character comes from a name; colours are added
after escaping.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 controls, with which terminal commands begin (ECMA-48), and marks that change the order of letters."""


@contextmanager
def patient_output(before_writing: Callable[[], None] | None = None) -> Iterator[None]:
    """Make standard output and standard error drop text without errors once their readers have closed them.

    Args:
        before_writing: called before each text, to remove the line of progress.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_patient(stream, before_writing) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # a closed pipe must fail here, not at interpreter exit
        sys.stdout, sys.stderr = before


def drop_the_rest(stream: Any) -> None:
    """Redirect a stream without a reader, with its buffered text, to the null device."""
    with suppress(OSError, ValueError):  # without a descriptor there is nothing to redirect
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def escaped(text: str) -> str:
    """Return a text with its control characters as Python escape sequences; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class _Patient:
    """A text stream that drops text once its reader has closed it; other attributes are those of the stream."""

    def __init__(self, stream: TextIO, before_writing: Callable[[], None] | None) -> None:
        self._stream = stream
        self._before_writing = before_writing or (lambda: None)
        self._is_coloured = wants_colour(stream)

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        self._before_writing()
        plain = escaped(text)
        try:
            self._stream.write(painted(plain) if self._is_coloured else plain)
            return len(text)
        except BrokenPipeError:
            drop_the_rest(self._stream)
            return len(text)

    def flush(self) -> None:
        """Write the buffered text, or drop it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            drop_the_rest(self._stream)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _patient(stream: TextIO, before_writing: Callable[[], None] | None) -> TextIO:
    """Return a patient stream; return None (a closed stream), to which `print` writes nothing, unchanged."""
    return cast(TextIO, _Patient(stream, before_writing)) if stream is not None else stream


# Colours of a terminal are added to finished lines of plain text, by how they begin, so verbs need not know about them.
#
#     MISMATCH: 3 of 45 values differ ...     red        + %add = AddN(...)    green
#     ok: 45 values agree ...                 green      note: ...             dim
#
# There are none if the stream is no terminal, NO_COLOR is set (https://no-color.org), or TERM is dumb.


_RED, _GREEN, _YELLOW, _BOLD, _DIM = "31", "32", "33", "1", "2"
_RULES = (
    (re.compile(r"^ok:"), _GREEN),
    (re.compile(r"^MISMATCH:"), _RED),
    (re.compile(r"^[A-Z]\w+Error: "), _RED),
    (re.compile(r"^\S+  DIFFERS  .*$"), _RED),
    (re.compile(r"^first (?:pass|value):"), _BOLD),
    (re.compile(r"^refused:"), _RED),
    (re.compile(r"^  \+ .*$"), _GREEN),
    (re.compile(r"^  - .*$"), _RED),
    (re.compile(r"^(?:not exact|whole):"), _YELLOW),
    (re.compile(r"^ *(?:note:|hint) .*$"), _DIM),
    (re.compile(r"^next:"), _BOLD),
)
"""The first rule that matches colours its match. Each pattern is anchored and short, so that long lines are fast."""


def wants_colour(stream: TextIO) -> bool:
    """Return whether text on a stream may be coloured."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def painted(text: str) -> str:
    """Return a text of whole lines with its colours."""
    return "".join(map(_line, text.splitlines(keepends=True)))


def _line(line: str) -> str:
    for pattern, code in _RULES:
        found = pattern.match(line)
        if found is not None:
            return f"\x1b[{code}m{found[0]}\x1b[0m{line[found.end() :]}"
    return line


# TensorFlow's log lines: information and warnings of its C++ code are held back, and shown if a verb fails.
#
# I0000 00:00:1795700000.123456   11621 port.cc:153] oneDNN custom operations are on ...        held back
# F0000 ..., E0000 ..., and whatever has another form                                           is shown at once

NOISE = re.compile(
    rb"([IW]\d{4} \d|\d{4}-\d\d-\d\d [\d:.]+: [IW] tensorflow/|WARNING: All log messages before absl|To enable the f)"
)


@contextmanager
def quiet_tensorflow() -> Iterator[Callable[[], None]]:
    """Hold such lines back during a block; yield a function that shows them."""
    if sys.stderr is not sys.__stderr__ or sys.stderr is None:  # the program captures standard error already
        yield lambda: None
        return
    sys.stderr.flush()
    kept: list[bytes] = []
    shown, (read, write) = os.dup(2), os.pipe()

    def pass_on() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if NOISE.match(line):
                    kept.append(line)
                else:
                    os.write(shown, line)

    reader = threading.Thread(target=pass_on, daemon=True)
    os.dup2(write, 2)
    os.close(write)
    sys.stderr = os.fdopen(os.dup(shown), "w", buffering=1, errors="backslashreplace")
    reader.start()
    try:
        yield lambda: _write_all(shown, kept)
    finally:
        sys.stderr.flush()
        sys.stderr = sys.__stderr__
        os.dup2(shown, 2)
        reader.join(1)
        os.close(shown)


def _write_all(shown: int, kept: list[bytes]) -> None:
    while kept:
        os.write(shown, kept.pop(0))
