"""Liveness: how many bytes are alive when. One sweep for all who price memory; they differ in the schedule they play.

schedule                        a buffer is born                  and freed
tasks that are played           when its maker has its inputs     at the end of its last reader     `cost.tasks`
parts of micro-batches          when its part starts              at the end of the last part       `cost.pipeline`
a queue of nodes, and copies    at the place of its maker         after its last reader             `resolve.remat`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

POINTS = 400
"""To so many points a line of memory over time is drawn."""
HOLDERS = 20
"""So many of those that hold memory at the peak are named."""
Holders = tuple[tuple[str, int], ...]
"""Names and bytes, the most first."""
Line = tuple[tuple[float, int], ...]
"""Seconds since the start of the step, and the bytes that are alive from then on."""


@dataclass(frozen=True, eq=False)
class Lives:
    """Buffers of one device.

    Attributes:
        born: when each is made.
        freed: when nobody needs it any more; infinity where that is after the step.
        nbytes: less than nothing where a part gives back in its middle what is counted to its end.
        kept: bytes that are always there.
    """

    born: Any
    freed: Any
    nbytes: Any
    kept: int = 0

    @classmethod
    def of(cls, rows: Iterable[tuple[float, float, int]], kept: int = 0) -> Lives:
        """Return the lives of buffers, each a row."""
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return cls(np.array(columns[0], float), np.array(columns[1], float), np.array(columns[2], np.int64), kept)

    @cached_property
    def _sweep(self) -> tuple[Any, Any]:
        """When something changes, and what is alive then."""
        times = np.concatenate([self.born, self.freed])
        changes = np.concatenate([self.nbytes, np.negative(self.nbytes)])
        order = np.lexsort((changes, times))  # of what happens at one time, memory is given back first
        return times[order], np.cumsum(changes[order]) + self.kept

    @property
    def peak(self) -> int:
        """The most bytes that are alive at one time."""
        return max(self.kept, int(self._sweep[1].max(initial=0)))

    @property
    def top(self) -> float:
        """When that is so for the first time."""
        times, alive = self._sweep
        return float(times[alive.argmax()]) if alive.size else 0.0

    def over_time(self) -> Line:
        """Return bytes over time, `peak` at the highest point; of many changes, the most of each of `POINTS` parts."""
        times, alive = (column.tolist() for column in self._sweep)
        found = [(0.0, self.kept), *zip(times, alive, strict=True)]
        if len(found) <= POINTS:
            return tuple(found)
        width, most, last = found[-1][0] / POINTS or 1.0, list[int](), self.kept
        for at, nbytes in found:
            part = min(POINTS - 1, int(at / width))
            while len(most) <= part:  # nothing changes in a part: it has what the one before ended with
                most.append(last)
            most[part] = max(most[part], nbytes)
            last = nbytes
        return (*((part * width, nbytes) for part, nbytes in enumerate(most)), (found[-1][0], last))


def first_holders(held: Counter[str]) -> Holders:
    """Return those that hold most; all others together."""
    first = held.most_common(HOLDERS)
    others = sum(held.values()) - sum(nbytes for _, nbytes in first)
    return (*first, (f"{len(held) - len(first)} others", others)) if others else tuple(first)
