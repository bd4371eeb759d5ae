"""Cut a chain of repeated layers into isomorphic stages.

ops    g m t m t m t m t s      stages 2      ──►   g m t m t | m t m t s       the cut that the fewest bytes cross
         ▔▔▔ ▔▔▔ ▔▔▔ ▔▔▔        a period of 2, four times
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


def repeated_layers(signs: Sequence[Hashable], crossing: Sequence[float], stages: int) -> list[int] | None:
    """Return where each stage but the first begins; None where nothing is repeated as often as there are stages.

    Args:
        signs: what each unit does, in order.
        crossing: what would have to be sent if a stage began at a unit, by unit.
        stages: how many.
    """
    known: dict[Hashable, int] = {}
    numbers = np.asarray([known.setdefault(sign, len(known)) for sign in signs])
    best, begins = 0, None
    for period in range(1, len(signs) // stages + 1):
        start, length = _longest(numbers[:-period] == numbers[period:])
        layers = (length + period) // period // stages * stages
        if layers * period > best:
            best = layers * period
            begins = (start, length + period - best, best // stages)
    if begins is None:
        return None
    start, slack, step = begins
    cuts = [[first + stage * step for stage in range(1, stages)] for first in range(start, start + slack + 1)]
    return min(cuts, key=lambda cut: sum(crossing[at] for at in cut))


def _longest(alike: Any) -> tuple[int, int]:
    """Return where the longest row of true values begins, and how long it is."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], alike.astype(np.int8), [0]))))
    if not len(ends):
        return 0, 0
    lengths = ends[1::2] - ends[::2]
    longest = int(np.argmax(lengths))
    return int(ends[2 * longest]), int(lengths[longest])
