"""The plans that a search has compared, as a table: step, memory, communication, and why each was taken or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autograph_rewrite.diagnostics.amounts import size
from autograph_rewrite.inspect.render.table import drawn, table
from autograph_rewrite.plan.parts.ranking import row_of

NAME = 60  # characters of a plan's description


def without_ranking(notes: Iterable[str]) -> tuple[str, ...]:
    """Return the notes of a plan that are no rows of its ranking."""
    return tuple(note for note in notes if row_of(note) is None)


def ranking_text(notes: Sequence[str]) -> str:
    """Return the ranking among the notes of a plan as a table; empty where there is none."""
    rows = [row for row in map(row_of, notes) if row is not None]
    if not rows:
        return ""
    columns = ("#rank", "plan", "#step", "#memory per device", "#moved", "verdict")
    shown = [
        (
            row.rank,
            row.plan if len(row.plan) <= NAME else f"{row.plan[: NAME - 3]}...",
            f"{row.milliseconds:.4g} ms",
            size(round(row.mebibytes * 2**20)),
            size(round(row.moved * 2**20)),
            row.verdict,
        )
        for row in rows
    ]
    return drawn(table("plans that were compared, predicted", columns, shown))
