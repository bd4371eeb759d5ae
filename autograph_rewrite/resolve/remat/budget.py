"""The policy budget:SIZE: the fewest FLOPs added for which the static peak of a device fits.

    limit of the chain    80 MiB   120 MiB   100 MiB   110 MiB        by halves
    peak of the step      fits     too much  fits      too much
    FLOPs added           300      -         200       -              the fewest that fit are taken

The dynamic programme of `chain_budget` chooses for a limit on what a chain of cuts keeps; `step_memory` says what peak
the whole step then has, gradients and branches included. Then single stops are moved, the most promising choice first.
All of it is limited by counts, not by the clock, so that all processes of a job choose alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.chain_budget import Costs, Part, least_flops
from autograph_rewrite.resolve.remat.cuts import Place, candidates, chain_of
from autograph_rewrite.resolve.remat.decide import segments_of
from autograph_rewrite.resolve.remat.decision import Left, Segment
from autograph_rewrite.resolve.remat.step_memory import StepMemory
from autograph_rewrite.resolve.stages.flops import cost_of

MAX_STOPS = 64
HALVINGS = 8
WORK = 60_000
"""How many nodes the search behind the dynamic programme looks at, about."""
ROUNDS = 4
"""How often less is asked for, before an error says what the least is."""


@dataclass(frozen=True)
class Choice:
    """One way to spend FLOPs on memory.

    Attributes:
        parts: of the chain, what is computed again.
        segments: made of them.
        left: what had better be kept.
        flops: that they add, of one example.
        peak: bytes of the whole step.
    """

    parts: tuple[Part, ...]
    segments: tuple[Segment, ...]
    left: tuple[Left, ...]
    flops: float
    peak: int


@dataclass
class Search:
    """Choices that have been looked at.

    Attributes:
        acts: what may be computed again.
        memory: tells the peak of a choice.
        places: where the forward can be cut.
        costs: of the chain that they make.
        seen: by parts.
    """

    acts: Activations
    memory: StepMemory
    places: Sequence[Place]
    costs: Costs
    seen: dict[tuple[Part, ...], Choice] = field(default_factory=dict)

    def look(self, parts: Iterable[Part]) -> Choice:
        """Return what comes of computing some parts again."""
        key = tuple(part for part in parts if self.costs.flops[part] > 0)
        if key not in self.seen:
            segments, left = segments_of(self.acts, self._numbers(key), only_saving=True)
            nodes = self.acts.state.graph.nodes
            peak = self.memory.peak([[nodes[name] for name in segment.nodes] for segment in segments])
            flops = sum(segment.added_flops for segment in segments)
            self.seen[key] = Choice(key, tuple(segments), tuple(left), flops, peak)
        return self.seen[key]

    def _numbers(self, parts: Iterable[Part]) -> dict[Node, int]:
        """Return the segments of nodes: what crosses the end of a part is kept."""
        numbers: dict[Node, int] = {}
        for number, (begin, end) in enumerate(parts):
            first = self.places[begin - 1].at if begin else 0
            last = self.places[end - 1].at if end <= len(self.places) else len(self.acts.forward)
            crosses = _crossing(self.places, end)
            for node in self.acts.forward[first:last]:
                if node in self.acts.repeatable and root_of(node) not in crosses:
                    numbers[node] = number
        return numbers

    def fitting(self, limit: int) -> Choice | None:
        """Return the choice that fits, and adds the fewest FLOPs."""
        fits = [choice for choice in self.seen.values() if choice.peak <= limit]
        return min(fits, key=lambda one: (one.flops, one.peak, one.parts), default=None)

    @property
    def smallest(self) -> Choice:
        """The choice of the least peak."""
        return min(self.seen.values(), key=lambda one: (one.peak, one.flops, one.parts))


def choose(acts: Activations, memory: StepMemory, limit: int, policy: str) -> Choice:
    """Return the cheapest way to fit.

    Args:
        acts: what may be computed again.
        memory: of the step.
        limit: bytes of a device.
        policy: as the configuration names it.

    Raises:
        PlanError: nothing fits; it says the least peak that was found.
    """
    places = candidates(chain_of(acts, memory.nbytes), MAX_STOPS)
    search = Search(acts, memory, places, costs_of(acts, memory, places))
    plain = search.look(())
    if plain.peak > limit:
        _by_halves(search, limit)
        _move_stops(search, limit)
    best = search.fitting(limit)
    if best is None:
        least = _least(search)
        raise PlanError(
            f"remat.policy {policy}: a step takes at least {least:,} B on a device with all that computing again can "
            f"save, of which {memory.kept:,} B are variables, inputs and constants; without it {plain.peak:,} B",
            hint=f"set budget to {least} or more, or divide the batch by more micro-batches or replicas",
        )
    return best


def _least(search: Search) -> int:
    """Return the least peak that is found by asking for less and less."""
    least = search.smallest.peak
    for _ in range(ROUNDS):
        _by_halves(search, least - 1)
        _move_stops(search, least - 1)
        if search.smallest.peak == least:
            break
        least = search.smallest.peak
    return least


def _by_halves(search: Search, limit: int) -> None:
    """Look for the largest limit of the chain with which the whole step fits, or else for the least there is."""
    low, high = 0.0, float(search.costs.kept.sum())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        parts = least_flops(search.costs, middle)
        if parts is None or search.look(parts).peak <= limit:
            low = middle
        else:
            high = middle


def _move_stops(search: Search, limit: int) -> None:
    """Move single stops of the most promising choice again and again: of few FLOPs, and little more than what fits."""
    plain, flops = search.look(()).peak, search.costs.flops[0, -1]

    def promise(choice: Choice) -> tuple[float, tuple[Part, ...]]:
        return choice.flops / flops + max(0, choice.peak - limit) / max(1, plain - limit), choice.parts

    looks = max(4, WORK // max(1, search.memory.work))
    waiting = [(promise(choice), choice) for choice in search.seen.values()]
    heapq.heapify(waiting)
    while waiting:
        _, start = heapq.heappop(waiting)
        for parts in _neighbours(start.parts, len(search.places) + 1):
            before = len(search.seen)
            found = search.look(parts)
            if len(search.seen) > before:
                heapq.heappush(waiting, (promise(found), found))
                looks -= 1
            if looks <= 0:
                return


def _neighbours(parts: tuple[Part, ...], end: int) -> Iterator[tuple[Part, ...]]:
    """Yield what differs in one stop: a part less, shorter, longer, cut in two, or one more."""
    for i, (a, b) in enumerate(parts):
        before, after = parts[:i], parts[i + 1 :]
        floor = before[-1].end if before else 0
        ceiling = after[0].begin if after else end
        yield (*before, *after)
        for c, d in ((a + 1, b), (a, b - 1), (a - 1, b), (a, b + 1)):
            if floor <= c < d <= ceiling:
                yield (*before, Part(c, d), *after)
        yield from ((*before, Part(a, c), Part(c, b), *after) for c in range(a + 1, b))
        if after and after[0].begin == b:
            yield (*before, Part(a, after[0].end), *after[1:])
            joined = after[0]
            for c in (b - 1, b + 1):
                if a < c < joined.end:
                    yield (*before, Part(a, c), Part(c, joined.end), *after[1:])
    stops = [0, *(stop for part in parts for stop in part), end]
    for begin, last in zip(stops[::2], stops[1::2], strict=True):
        for a in range(begin, last):
            added = Part(a, a + 1)
            yield tuple(sorted((*parts, added)))


def _crossing(places: Sequence[Place], stop: int) -> frozenset[Node]:
    """Return the nodes whose memory is read behind a stop, and before it."""
    at_ends = not stop or stop > len(places)
    return frozenset() if at_ends else frozenset(one.node for one in places[stop - 1].crossing)


def costs_of(acts: Activations, memory: StepMemory, places: Sequence[Place]) -> Costs:
    """Return what the parts of a chain keep, and what computing them again costs.

    Args:
        acts: what may be computed again.
        memory: of the step.
        places: where the chain may be cut.
    """
    starts = np.array([0, *(place.at for place in places), len(acts.forward)])
    count = len(starts)
    crossing, inside, flops = (np.zeros((count, count)) for _ in range(3))
    bare = np.zeros(count)
    today = {root_of(node) for node in acts.forward if acts.is_kept_today(node)} & acts.repeatable
    for b, place in enumerate(places, start=1):
        for one in place.crossing:
            crossing[: np.searchsorted(starts, one.at, side="right"), b] += one.nbytes
            bare[b] += 0 if one.node in today else one.nbytes
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
    return Costs(kept, bare, crossing, inside, flops)


def _needed(
    acts: Activations, nodes: Sequence[tuple[int, Node]], crosses: Collection[Node]
) -> Iterator[tuple[int, Node]]:
    """Yield, of nodes and their places, those that gradients need besides what crosses, the last first."""
    needed: set[Node] = set()
    for i, node in reversed(nodes):
        if root_of(node) not in crosses and (node in needed or acts.is_kept_today(node)):
            needed.update(value.node for value in node.inputs)
            yield i, node
