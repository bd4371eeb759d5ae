"""Write and read notes: remarks on a plan or a rewrite, and the ranking of plans that a search has compared."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_STAYS_WHOLE = re.compile(r"'(?P<name>.+)' stays whole: (?P<why>.+)")


@dataclass(frozen=True)
class Note:
    """A remark on a node, such as one that runs whole because no rule divides it, or on a setting."""

    node: str
    op: str
    text: str


def stays_whole(name: str, why: str) -> str:
    """Return a plan's note on a variable that a strategy would split, and that cannot be split."""
    return f"'{name}' stays whole: {why}"


def kept_whole(notes: Iterable[str]) -> dict[str, str]:
    """Return the variables that stay whole by a plan's notes, with the reason for each."""
    found = (_STAYS_WHOLE.fullmatch(note) for note in notes)
    return {one["name"]: one["why"] for one in found if one is not None}


# The ranking of plans that a search has compared: notes of the plan that it chose, one row each.
#
# rank 1 | 88.5 ms | 52.9 MiB | 1.25 MiB moved | fits | chosen | AllReduce (shared), mesh 1 x 2, inner/w split [1, 2]
# rank 2 | 91.0 ms | 40.1 MiB | 3.5 MiB moved | fits | 2.8 % slower | FSDP (shared)

_ROW = re.compile(
    r"rank (\d+) \| (\S+) ms \| (\S+) MiB \| (\S+) MiB moved \| (fits|does not fit|-) \| ([^|]*) \| (.*)", re.DOTALL
)
CHOSEN = "chosen"
SHOWN = 16
"""Most plans that are listed."""


@dataclass(frozen=True)
class RankedPlan:
    """One plan.

    Attributes:
        rank: 1 for the best.
        milliseconds: of a step, predicted.
        mebibytes: the predicted peak of a device.
        moved: mebibytes that move in a step.
        fits: whether it fits the memory limit; None without a limit.
        verdict: "chosen", or why it was not.
    """

    rank: int
    milliseconds: float
    mebibytes: float
    moved: float
    fits: bool | None
    verdict: str
    plan: str

    def __str__(self) -> str:
        fits = "-" if self.fits is None else "fits" if self.fits else "does not fit"
        return (
            f"rank {self.rank} | {self.milliseconds:.4g} ms | {self.mebibytes:.4g} MiB | {self.moved:.4g} MiB moved | "
            f"{fits} | {self.verdict} | {self.plan}"
        )


def ranking(notes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows among the notes of a plan, as plain data."""
    return [asdict(row) for row in map(row_of, notes) if row is not None]


def row_of(note: str) -> RankedPlan | None:
    """Return the row that a note holds; None for any other note."""
    found = _ROW.fullmatch(note)
    if found is None:
        return None
    fits = None if found[5] == "-" else found[5] == "fits"
    return RankedPlan(int(found[1]), float(found[2]), float(found[3]), float(found[4]), fits, found[6], found[7])
