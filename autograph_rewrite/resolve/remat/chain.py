"""A chain of cuts whose memory stays below a limit, with the least recomputation: where a search for a budget starts.

    stops     0        1        2        3        4
    parts     [ keep  ] [   again         ] [ keep ]       what crosses stop 3 is kept; of the part before it, nothing
    bytes     4         1 (crosses 3)       4

A dynamic program decides for each part between two stops whether it is computed again or, where the stops are
neighbours, kept. At each stop it follows the pairs of bytes and FLOPs that no other pair beats in both. A part that is
computed again must fit next to what is kept up to its end, so a pair that holds less is never worse. T. Chen et al.,
Training Deep Nets with Sublinear Memory Cost (2016), cuts chains so; P. Jain et al., Checkmate (2020), states the trade
of memory for FLOPs, and solves it by an integer program. Nothing is computed more than twice.

The chain knows only what it keeps. Which limit on that makes the whole step fit is found by halves:

    limit of the chain    80 MiB   120 MiB   100 MiB   110 MiB
    peak of the step      fits     too much  fits      too much
    FLOPs added           300      -         200       -
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.cuts import CutPlace, candidates, chain_of, crossing_bytes
from autograph_rewrite.resolve.remat.policies import Parts
from autograph_rewrite.resolve.remat.step_memory import StepMemory
from autograph_rewrite.resolve.stages.flops import cost_of

MAX_STOPS = 64
HALVINGS = 8

MAX_PAIRS = 192
"""How many pairs of bytes and FLOPs are followed at a stop of a long chain."""
SHORT = 24
"""On so many stops, all pairs are followed: the choice is the best there is."""
KEPT, AGAIN = 0, 1


class ChainPart(NamedTuple):
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


def least_flops(costs: Costs, limit: float) -> list[ChainPart] | None:
    """Return what is computed again so that the fewest FLOPs are added; None where nothing fits.

    Args:
        costs: the chain.
        limit: bytes that are kept, and made again, at a time.
    """
    limit = limit * (1 + 1e-9)  # sums of the same bytes in another order may differ in the last bit
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


def _parts(found: list[tuple[_Pairs, _Pairs]], pair: int) -> list[ChainPart]:
    """Return the way that a pair at the end came."""
    parts: list[ChainPart] = []
    stop, state = len(found) - 1, KEPT
    while stop:
        pairs = found[stop][state]
        before, kind = int(pairs.stop[pair]), int(pairs.state[pair])
        if kind == AGAIN:
            parts.append(ChainPart(before, stop))
        pair, stop, state = int(pairs.pair[pair]), before, kind
    return parts[::-1]


def look_by_halves(acts: Activations, memory: StepMemory, limit: int, peak_of: Callable[[Parts], int]) -> None:
    """Look for the largest limit of the chain with which the whole step fits, or else for the least there is."""
    places = candidates(chain_of(acts, memory.nbytes), MAX_STOPS)
    costs = _costs_of(acts, memory, places)
    low, high = 0.0, float(costs.kept.sum())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        parts = least_flops(costs, middle)
        # a chain that nothing fits needs a higher limit; one with which the step fits may keep more
        if parts is None or peak_of(_numbers(acts, places, parts)) <= limit:
            low = middle
        else:
            high = middle


def _numbers(acts: Activations, places: Sequence[CutPlace], parts: Iterable[ChainPart]) -> dict[Node, int]:
    """Return the segments of nodes: what crosses the end of a part is kept."""
    numbers: dict[Node, int] = {}
    for number, (begin, end) in enumerate(parts):
        first = places[begin - 1].at if begin else 0
        last = places[end - 1].at if end <= len(places) else len(acts.forward)
        crosses = _crossing(places, end)
        for node in acts.forward[first:last]:
            if node in acts.repeatable and root_of(node) not in crosses:
                numbers[node] = number
    return numbers


def _crossing(places: Sequence[CutPlace], stop: int) -> frozenset[Node]:
    """Return the nodes whose memory is read behind a stop, and before it."""
    at_ends = not stop or stop > len(places)
    return frozenset() if at_ends else frozenset(one.node for one in places[stop - 1].crossing)


def _costs_of(acts: Activations, memory: StepMemory, places: Sequence[CutPlace]) -> Costs:
    """Return what the parts of a chain keep, and what computing them again costs."""
    starts = np.array([0, *(place.at for place in places), len(acts.forward)])
    count = len(starts)
    inside, flops = (np.zeros((count, count)) for _ in range(2))
    bare = np.zeros(count)
    today = {root_of(node) for node in acts.forward if acts.is_kept_today(node)} & acts.repeatable
    for b, place in enumerate(places, start=1):
        bare[b] = sum(one.nbytes for one in place.crossing if one.node not in today)
    nodes = [(i, node) for i, node in enumerate(acts.forward) if node in acts.repeatable]
    for b in range(1, count):
        here = [(i, node) for i, node in nodes if i < starts[b]]
        for i, node in _needed(acts, here, _crossing(places, b)):
            at = np.searchsorted(starts, i, side="right")
            flops[:at, b] += cost_of(acts.state, node)
            inside[:at, b] += memory.nbytes(node) if node in today else 0
    alone = np.zeros(len(acts.forward) + 1)
    for i, node in nodes:
        alone[i + 1] = memory.nbytes(node) if node in today else 0
    kept = np.concatenate([[0], np.diff(np.cumsum(alone)[starts])])
    return Costs(kept, bare, crossing_bytes(places), inside, flops)


def _needed(
    acts: Activations, nodes: Sequence[tuple[int, Node]], crosses: Collection[Node]
) -> Iterator[tuple[int, Node]]:
    """Yield, of nodes and their places, those that gradients need besides what crosses, the last first."""
    needed: set[Node] = set()
    for i, node in reversed(nodes):
        if root_of(node) not in crosses and (node in needed or acts.is_kept_today(node)):
            needed.update(value.node for value in node.inputs)
            yield i, node
