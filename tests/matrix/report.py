"""The one place that knows the shape of `item.report`: what each gradient costs, and which ops have no rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEP = "step"  # the owner of what is reduced for no variable: losses, norms, statistics, metrics


@dataclass(frozen=True)
class Exchange:
    """What the replicas exchange for one variable's gradient."""

    reductions: int
    gathers: int  # a sparse gradient: its indices and its values

    @property
    def once(self) -> bool:
        """Return whether the gradient is exchanged exactly once: one reduction, or one pair of gathers."""
        return (self.reductions, self.gathers) in ((1, 0), (0, 2))


def report_of(distributed: Any) -> Any:
    """Return the report of a rewritten item, or of the first trace of a distributed function or model."""
    items = getattr(distributed, "items", None)
    return items[0].report if items else getattr(distributed, "report", None)


def exchanges_of(report: Any) -> Mapping[str, Exchange]:
    """Return what is exchanged for each variable."""
    if report is None:
        return {}
    owners = [owner for owner in {**report.reductions, **report.gathers} if owner != STEP]
    return {owner: Exchange(report.reductions[owner], report.gathers[owner]) for owner in sorted(owners)}


def exchanges_in_all(report: Any) -> float:
    """Return how often the replicas exchange something, where a pair of gathers counts as one exchange."""
    return float(sum(report.reductions.values()) + sum(report.gathers.values()) / 2)


def notes_of(report: Any) -> tuple[str, ...]:
    """Return the ops that run whole for want of a rule, and other notes."""
    if report is None:
        return ()
    return tuple(f"{note.op} '{note.node}': {note.text}" for note in report.notes)
