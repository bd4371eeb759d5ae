"""The ranking of plans that a search has compared: notes of the plan that it chose, one row each.

rank 1 | 88.5 ms | 52.9 MiB | fits | AllReduce (shared), mesh 1 x 2, inner/w split [1, 2]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_ROW = re.compile(r"rank (\d+) \| (\S+) ms \| (\S+) MiB \| (fits|does not fit|-) \| (.*)", re.DOTALL)
SHOWN = 16
"""So many plans are listed."""


@dataclass(frozen=True)
class Row:
    """One plan.

    Attributes:
        rank: 1 for the best.
        milliseconds: of a step, predicted.
        mebibytes: the predicted peak of a device.
        fits: whether there is room for it; None where nobody says how much there is.
        plan: what it is.
    """

    rank: int
    milliseconds: float
    mebibytes: float
    fits: bool | None
    plan: str

    def __str__(self) -> str:
        fits = "-" if self.fits is None else "fits" if self.fits else "does not fit"
        return f"rank {self.rank} | {self.milliseconds:.4g} ms | {self.mebibytes:.4g} MiB | {fits} | {self.plan}"


def ranking(notes: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows among the notes of a plan, as plain data."""
    rows = []
    for note in notes:
        if found := _ROW.fullmatch(note):
            fits = None if found[4] == "-" else found[4] == "fits"
            rows.append(asdict(Row(int(found[1]), float(found[2]), float(found[3]), fits, found[5])))
    return rows
