"""Checkpoints on a chain: where to cut the forward pass so that little is kept and little is recomputed at a time.

    activations   1 1 1 1 | 1 1 1 1 | 1 1 1 1 | 1 1 1 1      kept: one at each cut, and one part at a time
    peak          3 at the cuts + 4 in the largest part

After T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); for chains of equal layers it comes out at
their square root. Cuts need not be single values: one that several values cross costs all of them, and a value that
crosses several cuts costs once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations, root_of

MAX_PLACES = 600
"""How many cuts are looked at; of more, the lightest in each stretch."""
SHORT = 40
"""Of so many cuts, the best choice is found for certain."""


class CrossingNode(NamedTuple):
    """A node whose memory is read on both sides of a cut: which node of the forward it is, and how many bytes."""

    at: int
    node: Node
    nbytes: float


@dataclass(frozen=True)
class CutPlace:
    """Where the forward can be cut: behind a node.

    Attributes:
        at: how many nodes of the forward are before it.
        crossing: what is read on both sides.
        nbytes: of what crosses.
        before: bytes that are kept today of what is before it.
    """

    at: int
    crossing: tuple[CrossingNode, ...]
    nbytes: float
    before: float


@dataclass(frozen=True)
class Chain:
    """The forward as a chain.

    Attributes:
        places: where it can be cut, in order.
        total: bytes that are kept today.
    """

    places: tuple[CutPlace, ...]
    total: float


def chain_of(acts: Activations, nbytes: Callable[[Node], float] | None = None) -> Chain:
    """Return the forward as a chain that can be cut where something that may be computed again crosses.

    Args:
        nbytes: the memory of a node; left out, that of one example.
    """
    nbytes = nbytes or acts.nbytes
    number = {node: i for i, node in enumerate(acts.forward)}
    ends: dict[Node, int] = {}
    kept = [0.0] * (len(acts.forward) + 1)
    counted: set[Node] = set()
    for node in acts.forward:
        root = root_of(node)
        if root not in acts.repeatable:
            continue
        readers = [number[use.node] for value in node.read_outputs for use in value.uses if use.node in number]
        ends[root] = max([ends.get(root, number[root]), *readers])
        if acts.is_kept_today(node) and root not in counted:
            counted.add(root)
            kept[number[root] + 1] += nbytes(root)
    before = np.cumsum(kept).tolist()
    closes: dict[int, list[Node]] = {}
    for root, end in ends.items():
        closes.setdefault(end, []).append(root)
    open_: dict[Node, CrossingNode] = {}
    places = []
    for i, node in enumerate(acts.forward):
        for root in closes.get(i, ()):
            open_.pop(root, None)
        if ends.get(node, i) > i:
            open_[node] = CrossingNode(i, node, nbytes(node))
        if open_:
            crossing = tuple(open_.values())
            places.append(CutPlace(i + 1, crossing, sum(one.nbytes for one in crossing), before[i + 1]))
    return Chain(tuple(places), before[-1])


def single_cuts(chain: Chain) -> list[CutPlace]:
    """Return where one value alone crosses: of those between which gradients need nothing, the lightest."""
    return _lightest(place for place in chain.places if len(place.crossing) == 1)


def balanced_cuts(chain: Chain) -> list[int]:
    """Return after how many nodes to cut so that what is kept, and the largest part, are least together."""
    places = candidates(chain)
    if not places:
        return []
    total = chain.total
    before = np.array([0.0, *(place.before for place in places), total])
    costs = crossing_bytes(places)
    best, found = total, list[int]()
    # for each size that the largest part may have, the cuts that keep least; the best of these is the best there is
    for limit in _limits(before):
        chosen = _least_kept(before, costs, limit * (1 + 1e-9))
        if chosen is None:
            continue
        stops = [0, *chosen, len(before) - 1]
        kept = sum(costs[a, b] for a, b in itertools.pairwise(stops))
        peak = kept + max(before[b] - before[a] for a, b in itertools.pairwise(stops))
        if peak < best * (1 - 1e-9):
            best, found = peak, [places[i - 1].at for i in chosen]
    return found


def nested_cuts(chain: Chain) -> tuple[list[int], list[int]]:
    """Return after how many nodes to cut, and where the parts between are cut once more when they are computed again.

    Then the outer cuts, the inner ones of one part, and the largest part between two of these are there together: of a
    chain of n equal layers, three times the third root of n. Gradients begin in the last part, for which there is no
    second time: all its cuts are outer ones.
    """
    places = candidates(chain)
    before = np.array([0.0, *(place.before for place in places), chain.total])
    costs = crossing_bytes(places)
    best, found = chain.total, (list[int](), list[int]())
    for limit in _limits(before) if places else ():
        cuts = _least_kept(before, costs, limit * (1 + 1e-9)) or []
        for size in range(1, len(cuts) + 1):
            outer = cuts[size - 1 :: size]
            stops = [0, *outer, len(before) - 1]
            inner = [[a, *(cut for cut in cuts if a < cut < b), b] for a, b in itertools.pairwise(stops)]
            parts = [before[b] - before[a] for one in inner for a, b in itertools.pairwise(one)]
            kept = sum(costs[a, b] for a, b in itertools.pairwise(stops))
            again = max(sum(costs[a, b] for a, b in itertools.pairwise(one[:-1])) for one in inner)
            if (peak := kept + again + max(parts)) < best * (1 - 1e-9):
                best = peak
                last = [i for i in cuts if i > outer[-1]]
                found = [places[i - 1].at for i in (*outer, *last)], [places[i - 1].at for i in cuts]
    return found


def _limits(before: Any) -> list[float]:
    """Return what the largest part may weigh: of a short chain all that there can be, of a long one a choice."""
    if len(before) <= SHORT:
        return sorted({float(b - a) for i, a in enumerate(before) for b in before[i + 1 :]})
    counts = [float(n) for n in range(2, 65)]
    while counts[-1] * 1.15 < len(before):
        counts.append(counts[-1] * 1.15)
    return [before[-1] / count for count in counts]


def _lightest(places: Iterable[CutPlace]) -> list[CutPlace]:
    """Return, of the places before which the same is kept today, the one that the fewest bytes cross."""
    found: dict[float, CutPlace] = {}
    for place in places:
        if place.before and (place.before not in found or place.nbytes < found[place.before].nbytes):
            found[place.before] = place
    return list(found.values())


def candidates(chain: Chain, most: int = MAX_PLACES) -> Sequence[CutPlace]:
    """Return where a chain had best be cut: in each stretch of it, where the fewest bytes cross.

    Args:
        chain: the forward.
        most: how many places there are to be, at most.
    """
    places, total = _lightest(chain.places), chain.total
    if len(places) <= most:
        return places
    found: dict[int, CutPlace] = {}
    for place in places:
        stretch = int(place.before / total * most)
        if stretch not in found or place.nbytes < found[stretch].nbytes:
            found[stretch] = place
    return list(found.values())


def crossing_bytes(places: Sequence[CutPlace]) -> Any:
    """Return what the b-th cut keeps in addition where the a-th is the one before it; 0 is the start."""
    costs = np.zeros((len(places) + 2, len(places) + 2))
    starts = np.array([0, *(place.at for place in places)])
    for b, place in enumerate(places, start=1):
        for one in place.crossing:  # what is before the a-th cut is kept by that
            costs[: np.searchsorted(starts, one.at, side="right"), b] += one.nbytes
    return costs


def _least_kept(before: Any, costs: Any, limit: float) -> list[int] | None:
    """Return the cuts that keep least, of those between which no part exceeds a limit; None if there are none."""
    ends = len(before)
    best = np.full(ends, np.inf)
    best[0] = 0.0
    came = [0] * ends
    for b in range(1, ends):
        first = int(np.searchsorted(before, before[b] - limit, side="left"))
        if first >= b:
            return None
        totals = best[first:b] + costs[first:b, b]
        i = int(np.argmin(totals))
        best[b], came[b] = totals[i], first + i
    if not np.isfinite(best[-1]):
        return None
    chosen, at = [], came[-1]
    while at:
        chosen.append(at)
        at = came[at]
    return chosen[::-1]
