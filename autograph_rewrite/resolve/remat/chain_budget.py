"""The least recomputation of a chain whose memory stays below a limit: a dynamic programme over its cuts.

    stops     0        1        2        3        4
    parts     [ keep  ] [   again         ] [ keep ]       what crosses stop 3 is kept; of the part before it, nothing
    bytes     4         1 (crosses 3)       4

Each part between two stops is computed again, or, where they are neighbours, kept. For each stop there are the pairs of
bytes and FLOPs that no other pair beats in both. A part that is computed again must fit beside what is kept up to its
end, so a pair that holds less is never worse. T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016),
cuts chains so; P. Jain et al., Checkmate (2020), states the trade of memory for FLOPs, and solves it by an integer
program. Here nothing is computed more than twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_PAIRS = 192
"""How many pairs of bytes and FLOPs are followed at a stop of a long chain."""
SHORT = 24
"""On so many stops, all pairs are followed: the choice is the best there is."""
KEPT, AGAIN = 0, 1


class Part(NamedTuple):
    """What is computed again together: from behind one stop up to another."""

    begin: int
    end: int


@dataclass(frozen=True)
class Costs:
    """A chain by its stops, the first of which is its start and the last its end.

    Attributes:
        kept: of each part between neighbours, the bytes that gradients need of it.
        bare: of each stop, the bytes that cross it and that no gradient needs.
        crossing: [a, b]: bytes that cross b and are made behind a.
        inside: [a, b]: bytes that gradients need of the part from a to b, besides what crosses b.
        flops: [a, b]: to compute these again.
    """

    kept: Any
    bare: Any
    crossing: Any
    inside: Any
    flops: Any

    @property
    def stops(self) -> int:
        """How many there are."""
        return len(self.bare)


class _Pairs(NamedTuple):
    """Ways up to one stop: the bytes that each keeps, its FLOPs, and the way that it came."""

    nbytes: Any
    flops: Any
    stop: Any
    pair: Any
    state: Any


def least_flops(costs: Costs, limit: float) -> list[Part] | None:
    """Return what is computed again so that the fewest FLOPs are added; None where nothing fits.

    Args:
        costs: the chain.
        limit: bytes that are kept, and made again, at a time.
    """
    limit = limit * (1 + 1e-9)
    start = _Pairs(*(np.zeros(1) for _ in range(2)), *(np.full(1, -1) for _ in range(3)))
    found: list[tuple[_Pairs, _Pairs]] = [(start, start)]  # before a part that is kept, before one that comes again
    most = MAX_PAIRS if costs.stops > SHORT else 1 << 14
    for b in range(1, costs.stops):
        ways = [_again(found[a][AGAIN], costs, a, b, limit) for a in range(b)]
        kept = _kept(found[b - 1][KEPT], costs, b, limit)
        bare = kept._replace(nbytes=kept.nbytes + costs.bare[b])
        found.append((_best([*ways, kept], most), _best([*ways, bare], most)))
    end = found[-1][KEPT]
    if not end.flops.size:
        return None
    return _parts(found, int(np.argmin(end.flops)))


def _again(before: _Pairs, costs: Costs, a: int, b: int, limit: float) -> _Pairs:
    """Return the ways on which the part from a to b is computed again."""
    nbytes, flops = before.nbytes + costs.crossing[a, b], before.flops + costs.flops[a, b]
    fits = np.flatnonzero(nbytes + costs.inside[a, b] <= limit)
    return _Pairs(nbytes[fits], flops[fits], np.full(fits.size, a), fits, np.full(fits.size, AGAIN))


def _kept(before: _Pairs, costs: Costs, b: int, limit: float) -> _Pairs:
    """Return the ways on which the part that ends at b is kept."""
    nbytes = before.nbytes + costs.kept[b]
    fits = np.flatnonzero(nbytes <= limit)
    return _Pairs(nbytes[fits], before.flops[fits], np.full(fits.size, b - 1), fits, np.full(fits.size, KEPT))


def _best(ways: list[_Pairs], most: int) -> _Pairs:
    """Return the pairs that no other beats, in bytes and in FLOPs; of too many, some."""
    together = _Pairs(*(np.concatenate(columns) for columns in zip(*ways, strict=True)))
    order = np.lexsort((together.flops, together.nbytes))
    flops = together.flops[order]
    if not flops.size:
        return together
    least = np.minimum.accumulate(flops)
    order = order[np.concatenate([[True], flops[1:] < least[:-1]])]
    if order.size > most:
        order = order[np.unique(np.linspace(0, order.size - 1, most).astype(int))]
    return _Pairs(*(column[order] for column in together))


def _parts(found: list[tuple[_Pairs, _Pairs]], pair: int) -> list[Part]:
    """Return the way that a pair at the end came."""
    parts: list[Part] = []
    stop, state = len(found) - 1, KEPT
    while stop:
        pairs = found[stop][state]
        before, kind = int(pairs.stop[pair]), int(pairs.state[pair])
        if kind == AGAIN:
            parts.append(Part(before, stop))
        pair, stop, state = int(pairs.pair[pair]), before, kind
    return parts[::-1]
