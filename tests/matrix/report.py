"""The one place that knows the shape of `item.report`: reductions per variable, and ops without a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reductions_of(report: Any) -> Mapping[str, int]:
    """Return how often each variable's gradient is reduced."""
    found = getattr(report, "reductions", None)
    return dict(found) if found else {}


def notes_of(report: Any) -> tuple[str, ...]:
    """Return the notes about ops without a rule."""
    found = getattr(report, "notes", None)
    return tuple(str(note) for note in found) if found else ()
