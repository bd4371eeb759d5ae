"""Notes: remarks on a plan or a rewrite, each about a node or a setting."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_STAYS_WHOLE = re.compile(r"'(?P<name>.+)' stays whole: (?P<why>.+)")


@dataclass(frozen=True)
class Note:
    """A node that runs whole for want of a rule, or another thing to know."""

    node: str
    op: str
    text: str


def stays_whole(name: str, why: str) -> str:
    """Return a plan's note on a variable that a strategy would split, and that cannot be split."""
    return f"'{name}' stays whole: {why}"


def kept_whole(notes: Iterable[str]) -> dict[str, str]:
    """Return, of a plan's notes, the variables that stay whole, with the reason for each."""
    found = (_STAYS_WHOLE.fullmatch(note) for note in notes)
    return {one["name"]: one["why"] for one in found if one is not None}
