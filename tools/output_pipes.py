r"""Output streams of the command line: they survive who reads them, and never command the terminal.

    rewrite GRAPH -o OUT --print-changed | head      OUT is written all the same, and the exit code is the verb's own
    dump GRAPH                                       a node called ESC[2J is printed as \x1b[2J

Names come from files of strangers. Verbs print plain text, so every control character is one of a name; colours are
put on behind that.
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
"""C0 and C1 controls: the terminal's commands begin with them (ECMA-48); and marks that change the order of letters."""


@contextmanager
def patient_output(before_writing: Callable[[], None] | None = None) -> Iterator[None]:
    """Give standard output and standard error that take, and drop, what nobody reads any more, for a while.

    Args:
        before_writing: is called before each text; a line of progress goes then.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_patient(stream, before_writing) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # a closed pipe must be met here, not at interpreter exit
        sys.stdout, sys.stderr = before


def drop_the_rest(stream: Any) -> None:
    """Let a stream whose reader has gone, and what it still holds, go nowhere."""
    with suppress(OSError, ValueError):  # without a descriptor there is nothing to redirect
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def escaped(text: str) -> str:
    """Return a text with its control characters as escape sequences of Python; lines and tabs stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class _Patient:
    """A text stream that goes nowhere once its reader has gone; everything else is the stream's own."""

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
        """Hand on what is buffered, or drop it."""
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
    """Return a patient stream; None, which is what Python has for a closed one, takes everything already."""
    return cast(TextIO, _Patient(stream, before_writing)) if stream is not None else stream


# Colours of a terminal: put on finished lines of plain text, by how they begin, so that verbs know nothing of them.
#
#     MISMATCH: 3 of 45 values differ ...     red        + %add = AddN(...)    green
#     ok: 45 values agree ...                 green      note: ...             dim
#
# None where the stream is no terminal, where NO_COLOR is set (https://no-color.org), or TERM is dumb.


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
"""The first that fits decides; what it matches is painted. Few characters at the front, so that no line takes long."""


def wants_colour(stream: TextIO) -> bool:
    """Return whether what is written to a stream may be coloured."""
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


# TensorFlow's log lines: information and warnings of its C++ code wait until something goes wrong, and are shown then.
#
# I0000 00:00:1795700000.123456   11621 port.cc:153] oneDNN custom operations are on ...        waits
# F0000 ..., E0000 ..., and whatever has another form                                           is shown at once

NOISE = re.compile(
    rb"([IW]\d{4} \d|\d{4}-\d\d-\d\d [\d:.]+: [IW] tensorflow/|WARNING: All log messages before absl|To enable the f)"
)


@contextmanager
def quiet_tensorflow() -> Iterator[Callable[[], None]]:
    """Hold such lines back while the block runs; what it is given shows those of them that have come."""
    if sys.stderr is not sys.__stderr__ or sys.stderr is None:  # somebody looks at standard error already
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
