"""Implement the policy budget:SIZE: add the fewest FLOPs for which the static peak of a device fits.

It searches over sets of kept activations; each connected part of the others is a segment.

    kept     a b c     a b     a c     b c     a     ...
    FLOPs    0         3       5       9       8              what gradients need of the rest, computed once more
    floor    120       90      95      70      60             of the peak: no copy is made before it is read

Many sets are priced at once, as rows of bits. Only for sets that may be better than the best so far does the search
compute the peak of the whole step, gradients and branches included. With few activations it prices every set. With
many it starts from a chain of cuts, and prices changes of the best set: one activation more, one less, or one instead
of another. Its limits are counts, not times, so that all processes of a job choose alike. P. Jain et al., Checkmate
(2020), chooses among the same sets by an integer program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.op_work import cost_of
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations, Segment, root_of
from autograph_rewrite.resolve.remat.policies import CutPlace, Parts, candidates, chain_of, connected, crossing_bytes
from autograph_rewrite.resolve.remat.segments import segments_of, triggers_of, worth_repeating
from autograph_rewrite.resolve.remat.step_memory import StepMemory

# A chain of cuts whose memory stays below a limit, with the least recomputation: the start of a search for a budget.
#
#     stops     0        1        2        3        4
#     parts     [ keep  ] [   again         ] [ keep ]       what crosses stop 3 is kept; of the part before it, nothing
#     bytes     4         1 (crosses 3)       4
#
# A dynamic program decides for each part between two stops whether it is recomputed or, where the stops are
# neighbours, kept. At each stop it follows the pairs of bytes and FLOPs that no other pair beats in both. A part that
# is recomputed must fit next to the values that are kept up to its end, so a pair with fewer bytes is never worse.
# T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), cuts chains so; P. Jain et al., Checkmate
# (2020), states the trade of memory for FLOPs, and solves it by an integer program. Nothing is recomputed twice.
#
# The chain counts only the bytes that it keeps. Bisection finds the limit on these with which the whole step fits:
#
#     limit of the chain    80 MiB   120 MiB   100 MiB   110 MiB
#     peak of the step      fits     too much  fits      too much
#     FLOPs added           300      -         200       -


MAX_STOPS = 64
HALVINGS = 8

MAX_PAIRS = 192
"""Most pairs of bytes and FLOPs that are followed at a stop of a long chain."""
SHORT = 24
"""Up to this many stops, all pairs are followed, so that the choice is optimal."""
KEPT, AGAIN = 0, 1


class ChainPart(NamedTuple):
    """A part that is recomputed together: from after one stop up to another."""

    begin: int
    end: int


@dataclass(frozen=True)
class Costs:
    """A chain by its stops, the first of which is its start and the last its end.

    Attributes:
        kept: for each part between neighbours, the bytes that gradients need.
        bare: for each stop, the bytes that cross it and that no gradient needs.
        crossing: [a, b]: bytes that cross b and are made after a.
        inside: [a, b]: bytes that gradients need of the part from a to b, except for those that cross b.
        flops: [a, b]: to recompute these.
    """

    kept: Any
    bare: Any
    crossing: Any
    inside: Any
    flops: Any

    @property
    def stops(self) -> int:
        """The number of stops."""
        return len(self.bare)


class _Pairs(NamedTuple):
    """Ways up to one stop: the bytes that each keeps, its FLOPs, and the way before it (stop, pair and state)."""

    nbytes: Any
    flops: Any
    stop: Any
    pair: Any
    state: Any


def least_flops(costs: Costs, limit: float) -> list[ChainPart] | None:
    """Return the parts to recompute so that the fewest FLOPs are added; None where nothing fits.

    Args:
        limit: bytes that are kept or recomputed at a time.
    """
    limit = limit * (1 + 1e-9)  # sums of the same bytes in another order may differ in the last bit
    start = _Pairs(*(np.zeros(1) for _ in range(2)), *(np.full(1, -1) for _ in range(3)))
    found: list[tuple[_Pairs, _Pairs]] = [(start, start)]  # before a kept part, before a recomputed part
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
    """Return the ways on which the part from a to b is recomputed."""
    nbytes, flops = before.nbytes + costs.crossing[a, b], before.flops + costs.flops[a, b]
    fits = np.flatnonzero(nbytes + costs.inside[a, b] <= limit)
    return _Pairs(nbytes[fits], flops[fits], np.full(fits.size, a), fits, np.full(fits.size, AGAIN))


def _kept(before: _Pairs, costs: Costs, b: int, limit: float) -> _Pairs:
    """Return the ways on which the part that ends at b is kept."""
    nbytes = before.nbytes + costs.kept[b]
    fits = np.flatnonzero(nbytes <= limit)
    return _Pairs(nbytes[fits], before.flops[fits], np.full(fits.size, b - 1), fits, np.full(fits.size, KEPT))


def _best(ways: list[_Pairs], most: int) -> _Pairs:
    """Return the pairs that no other beats in both bytes and FLOPs, thinned out to `most`."""
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
    """Return the recomputed parts on the way to a pair at the end."""
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
    """Bisect for the largest limit of the chain with which the whole step fits, or else for the smallest limit."""
    places = candidates(chain_of(acts, memory.nbytes), MAX_STOPS)
    costs = _costs_of(acts, memory, places)
    low, high = 0.0, float(costs.kept.sum())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        parts = least_flops(costs, middle)
        # without any way within the limit, it has to rise; if the step fits, the chain may keep more
        if parts is None or peak_of(_numbers(acts, places, parts)) <= limit:
            low = middle
        else:
            high = middle


def _numbers(acts: Activations, places: Sequence[CutPlace], parts: Iterable[ChainPart]) -> dict[Node, int]:
    """Return the segments of nodes; nodes whose memory crosses the end of a part are kept."""
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
    """Return the nodes whose memory is read on both sides of a stop."""
    at_ends = not stop or stop > len(places)
    return frozenset() if at_ends else frozenset(one.node for one in places[stop - 1].crossing)


def _costs_of(acts: Activations, memory: StepMemory, places: Sequence[CutPlace]) -> Costs:
    """Return the bytes that the parts of a chain keep, and the cost of recomputing them."""
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
    """Yield the nodes and places that gradients need, except for nodes that cross, the last first."""
    needed: set[Node] = set()
    for i, node in reversed(nodes):
        if root_of(node) not in crosses and (node in needed or acts.is_kept_today(node)):
            needed.update(value.node for value in node.inputs)
            yield i, node


FEW = 16
"""Up to this many activations, every set is priced, so that the choice is optimal."""
ROWS = 10_000
"""Most changes of a set that are priced at a time; fewer for a large graph."""
WORK = 200_000
"""About how many nodes a search visits."""
_AT_ONCE = 4096
"""How many sets are priced in one matrix product, which bounds its memory."""


@dataclass(frozen=True)
class RematChoice:
    """One way to spend FLOPs on memory.

    Attributes:
        flops: that the segments add, for one example.
        peak: bytes of the whole step.
    """

    segments: tuple[Segment, ...]
    flops: float
    peak: int

    def rank(self, limit: int) -> tuple[int, float]:
        """Return a rank, lower for better choices: among those that fit by FLOPs, among all others by peak."""
        return max(self.peak, limit), self.flops


def choose(acts: Activations, memory: StepMemory, limit: int, policy: str, before: int = 0) -> RematChoice:
    """Return the cheapest way to fit.

    Args:
        limit: bytes of a device.
        policy: as the configuration names it.
        before: bytes of the original step; 0: those of the step without recomputation.

    Raises:
        PlanError: nothing fits; it names the least peak that was found.
    """
    plain = memory.peak(())
    if plain <= limit:
        return RematChoice((), 0.0, plain)
    sets = KeptSets(acts, memory)
    for aim in (limit, 0):  # 0: the least peak, whatever the limit, so that the error's budget fits
        found = BudgetSearch(acts, memory, aim).best(sets)
        if found.peak <= limit:
            return found
    raise PlanError(
        f"remat.policy {policy}: a step takes at least {found.peak:,} B on a device with all that computing again can "
        f"save, of which {memory.kept:,} B are variables, inputs and constants; without it {before or plain:,} B",
        hint=f"set budget to {found.peak} or more, or divide the batch by more micro-batches or replicas",
    )


@dataclass
class BudgetSearch:
    """A search, with the choices that were priced.

    Attributes:
        limit: bytes of a device.
        seen: choices by the nodes of their segments.
        looks: how many more sets may be priced in full.
    """

    acts: Activations
    memory: StepMemory
    limit: int
    seen: dict[tuple[tuple[str, ...], ...], RematChoice] = field(default_factory=dict)
    looks: int = 0
    _waits: dict[tuple[str, ...], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.looks = max(4, WORK // max(1, self.memory.work))

    def best(self, sets: KeptSets) -> RematChoice:
        """Return the best choice that is found."""
        self._look({})
        if len(sets.nodes) <= FEW:
            return self._better(sets, sets.all(), self._best_seen())
        look_by_halves(self.acts, self.memory, self.limit, lambda parts: self._look(parts).peak)
        best, changes = self._best_seen(), _changes(len(sets.nodes), min(ROWS, 40 * WORK // self.memory.work))
        while (found := self._better(sets, sets.near(best.segments, changes), best, only_first=True)) is not best:
            best = found  # the changes of a new best are new sets
        return best

    def _better(self, sets: KeptSets, rows: Any, best: RematChoice, *, only_first: bool = False) -> RematChoice:
        """Return the best of some sets and of `best`; or, with `only_first`, the first set that is better."""
        flops, floors = sets.price(rows)
        over, (peak, spent) = np.maximum(floors, self.limit), best.rank(self.limit)
        order = np.lexsort((floors, flops, over))
        order = order[((over < peak) | ((over == peak) & (flops < spent)))[order]]
        for i in order[: self.looks]:
            # the sets are in order of floors, then FLOPs: no later one can be better, whatever its peak is
            if (over[i], flops[i]) >= best.rank(self.limit):
                break
            self.looks -= 1
            found = self._keep(sets, rows[i])
            # the search for triggers of segments takes long, so it is done for better sets only
            if found.rank(self.limit) < best.rank(self.limit):
                found = self._settled(found)
            if found.rank(self.limit) < best.rank(self.limit):
                best = found
                if only_first:
                    break
        return best

    def _look(self, parts: Parts) -> RematChoice:
        """Return the choice that recomputes some parts."""
        return self._priced(segments_of(self.acts, parts, only_saving=True)[0])

    def _keep(self, sets: KeptSets, bits: Any) -> RematChoice:
        """Return the choice that keeps a set."""
        kept = {node for node, keeps in zip(sets.nodes, bits, strict=True) if keeps}
        return self._look(connected(self.acts, kept))

    def _best_seen(self) -> RematChoice:
        """Return the best choice so far, without segments that have no trigger."""
        ranked = sorted(self.seen.values(), key=lambda one: (*one.rank(self.limit), one.peak))
        fits = (self._settled(one) for one in ranked if one.peak <= self.limit)
        found = next((one for one in fits if one.peak <= self.limit), None)
        return found or self._settled(min(ranked, key=lambda one: one.rank(0)))

    def _settled(self, choice: RematChoice) -> RematChoice:
        """Return a choice without the segments that have no trigger: their nodes are kept."""
        waiting = [segment for segment in choice.segments if self._has_trigger(segment)]
        return choice if len(waiting) == len(choice.segments) else self._priced(waiting)

    def _priced(self, segments: Sequence[Segment]) -> RematChoice:
        key = tuple(segment.nodes for segment in segments)
        if key not in self.seen:
            peak = self.memory.peak([self._nodes(segment) for segment in segments])
            self.seen[key] = RematChoice(tuple(segments), sum(segment.added_flops for segment in segments), peak)
        return self.seen[key]

    def _has_trigger(self, segment: Segment) -> bool:
        if segment.nodes not in self._waits:
            nodes = self._nodes(segment)
            readers = {use.node for node in nodes for use in self.acts.readers(node)}
            self._waits[segment.nodes] = bool(triggers_of(self.acts, nodes, readers))
        return self._waits[segment.nodes]

    def _nodes(self, segment: Segment) -> list[Node]:
        return [self.acts.state.graph.nodes[name] for name in segment.nodes]


def _changes(count: int, most: int) -> Any:
    """Return the activations that change at a time, as rows of bits: one, two near each other, or of few any three."""
    reach = max(1, most // count)
    some = [(i, j) for i in range(count) for j in range(i, min(count, i + reach))]
    if math.comb(count, 3) <= most:
        some += itertools.combinations(range(count), 3)  # type: ignore[arg-type]
    rows = np.zeros((len(some), count), bool)
    for row, places in zip(rows, some, strict=True):
        row[list(places)] = True
    return rows


class KeptSets:
    """Prices sets of activations.

    Attributes:
        nodes: those that are worth keeping or recomputing; a set has a bit for each.
    """

    def __init__(self, acts: Activations, memory: StepMemory) -> None:
        self._acts, self._inside = acts, worth_repeating(acts, acts.repeatable)
        self.nodes = _choosable(acts, memory, self._inside)
        fixed, self._added = memory.floors(self.nodes)
        self._fixed = fixed + memory.kept

    def all(self) -> Any:
        """Return every set."""
        return (np.arange(1 << len(self.nodes))[:, None] >> np.arange(len(self.nodes)) & 1).astype(bool)

    def near(self, again: Sequence[Segment], changes: Any) -> Any:
        """Return the sets in which one of some segments is kept whole, or some activations change.

        Args:
            again: the segments that are recomputed.
            changes: the activations that change, one row for each set.
        """
        number = {node.name: i for i, node in enumerate(self.nodes)}
        whole = np.zeros((len(again), len(self.nodes)), bool)
        for row, segment in zip(whole, again, strict=True):
            row[[number[name] for name in segment.nodes if name in number]] = True
        kept = ~whole.any(axis=0)
        return np.concatenate([whole | kept, changes ^ kept])

    def price(self, sets: Any) -> tuple[Any, Any]:
        """Return the FLOPs that each set adds, and a lower bound of its peak.

        Args:
            sets: their bits, one row for each.
        """
        starts = range(0, len(sets), _AT_ONCE)
        floors = [(self._fixed + sets[i : i + _AT_ONCE].astype(float) @ self._added).max(axis=1) for i in starts]
        return self._flops(sets), np.concatenate(floors)

    def _flops(self, sets: Any) -> Any:
        kept = {node: sets[:, i] for i, node in enumerate(self.nodes)}
        needed: dict[Node, Any] = {}
        total = np.zeros(len(sets))
        for node in reversed(self._acts.forward):
            if node not in self._inside or not (self._acts.is_kept_today(node) or node in needed):
                continue
            again = np.ones(len(sets), bool) if self._acts.is_kept_today(node) else needed[node]
            if (keeps := kept.get(root_of(node))) is not None:
                again = again & ~keeps
            total += again * cost_of(self._acts.state, node)
            for value in node.inputs:
                needed[value.node] = needed[value.node] | again if value.node in needed else again
        return total


def _choosable(acts: Activations, memory: StepMemory, inside: Collection[Node]) -> tuple[Node, ...]:
    """Return the nodes that are worth keeping.

    A value that one node alone reads, and no gradient, need not be kept if that node's result takes no more bytes.
    """
    needed: set[Node] = set()
    for node in reversed(acts.forward):
        if node in inside and (node in needed or acts.is_kept_today(node)):
            needed |= {node, *(value.node for value in node.inputs if value.node in inside)}
    read = {root_of(node) for node in needed if acts.is_kept_today(node)}
    users: dict[Node, set[Node]] = {}
    for node in needed:
        for value in node.inputs:
            if (root := root_of(value.node)) is not root_of(node):
                users.setdefault(root, set()).add(node)

    def is_passed_on(node: Node) -> bool:
        after = users.get(node, set())
        return node not in read and len(after) == 1 and all(0 < memory.nbytes(n) <= memory.nbytes(node) for n in after)

    return tuple(n for n in acts.forward if n in needed and memory.nbytes(n) and not is_passed_on(n))
