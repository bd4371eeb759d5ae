"""Colours of a terminal: put on finished lines of plain text, by how they begin, so that verbs know nothing of them.

    MISMATCH: 3 of 45 values differ ...     red        + %add = AddN(...)    green
    ok: 45 values agree ...                 green      note: ...             dim

None where the stream is no terminal, where NO_COLOR is set (https://no-color.org), or TERM is dumb.
"""

from __future__ import annotations

import os
import re
from typing import TextIO

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
