"""The policy budget:SIZE: the fewest FLOPs added for which the static peak of a device fits.

It is a search over sets of activations that are kept; each connected part of the others is a segment.

    kept     a b c     a b     a c     b c     a     ...
    FLOPs    0         3       5       9       8              what gradients need of the rest, computed once more
    floor    120       90      95      70      60             of the peak: no copy is made before it is read

Many sets are priced at once, as rows of bits. Only of those that may be better than the best so far does the search ask
for the peak of the whole step, gradients and branches included. Of few activations it prices every set. Of many it
starts from a chain of cuts (`chain`), and prices changes of the best: one activation kept more, less, or for another.
It is limited by counts, not by the clock, so that all processes of a job choose alike. P. Jain et al., Checkmate
(2020), chooses among the same sets by an integer program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.chain import look_by_halves
from autograph_rewrite.resolve.remat.decision import Segment
from autograph_rewrite.resolve.remat.policies import Parts, connected
from autograph_rewrite.resolve.remat.segments import segments_of, triggers_of, worth_repeating
from autograph_rewrite.resolve.remat.step_memory import StageMemory, StageNeeds, StepMemory, StepRun
from autograph_rewrite.resolve.stages.flops import cost_of

FEW = 16
"""Of so many activations every set is priced: the choice is the best there is."""
ROWS = 10_000
"""How many changes of a set are priced at a time, at most; of a large graph, fewer."""
WORK = 200_000
"""How many nodes a search looks at, about."""
_AT_ONCE = 4096
"""How many sets are held against the times of a step at once."""


@dataclass(frozen=True)
class RematChoice:
    """One way to spend FLOPs on memory.

    Attributes:
        segments: what is computed again.
        flops: that they add, of one example.
        peak: bytes of the whole step.
    """

    segments: tuple[Segment, ...]
    flops: float
    peak: int

    def rank(self, limit: int) -> tuple[int, float]:
        """Return a number that is lower for what is better: what fits adds few FLOPs, what does not has a low peak."""
        return max(self.peak, limit), self.flops


def choose(acts: Activations, memory: StepMemory, limit: int, policy: str, before: int = 0) -> RematChoice:
    """Return the cheapest way to fit.

    Args:
        acts: what may be computed again.
        limit: bytes of a device.
        policy: as the configuration names it.
        before: bytes of the step as it was given; 0: as it is without what is chosen here.

    Raises:
        PlanError: nothing fits; it says the least peak that was found.
    """
    plain = memory.peak(())
    if plain <= limit:
        return RematChoice((), 0.0, plain)
    sets = KeptSets(acts, memory)
    for aim in (limit, 0):  # 0: the least peak, whatever the limit is, so that what the error says does fit
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
    """Choices that have been looked at.

    Attributes:
        acts: what may be computed again.
        memory: tells the peak of a choice.
        limit: bytes of a device.
        seen: by the nodes of its segments.
        looks: how many sets are still looked at.
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
            best = found  # its changes are others than those of the one before
        return best

    def _better(self, sets: KeptSets, rows: Any, best: RematChoice, *, only_first: bool = False) -> RematChoice:
        """Return what is best of some sets and of what there is; or the first of these sets that is better."""
        flops, floors = sets.price(rows)
        over, (peak, spent) = np.maximum(floors, self.limit), best.rank(self.limit)
        order = np.lexsort((floors, flops, over))
        order = order[((over < peak) | ((over == peak) & (flops < spent)))[order]]
        for i in order[: self.looks]:
            # what has a higher floor, or as high a one and more FLOPs, is no better whatever its peak is
            if (over[i], flops[i]) >= best.rank(self.limit):
                break
            self.looks -= 1
            found = self._keep(sets, rows[i])
            # whether segments have something to wait for takes long to tell, so it is asked only of what is better
            if found.rank(self.limit) < best.rank(self.limit):
                found = self._settled(found)
            if found.rank(self.limit) < best.rank(self.limit):
                best = found
                if only_first:
                    break
        return best

    def _look(self, parts: Parts) -> RematChoice:
        """Return what comes of computing some parts again."""
        return self._priced(segments_of(self.acts, parts, only_saving=True)[0])

    def _keep(self, sets: KeptSets, bits: Any) -> RematChoice:
        """Return what comes of keeping a set."""
        kept = {node for node, keeps in zip(sets.nodes, bits, strict=True) if keeps}
        return self._look(connected(self.acts, kept))

    def _best_seen(self) -> RematChoice:
        """Return the best choice so far, without segments that have nothing to wait for."""
        ranked = sorted(self.seen.values(), key=lambda one: (*one.rank(self.limit), one.peak))
        fits = (self._settled(one) for one in ranked if one.peak <= self.limit)
        found = next((one for one in fits if one.peak <= self.limit), None)
        return found or self._settled(min(ranked, key=lambda one: one.rank(0)))

    def _settled(self, choice: RematChoice) -> RematChoice:
        """Return a choice without the segments that have no gradient to wait for: their nodes are kept."""
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
    """Return which activations change places at a time, as rows of bits: one, two that are near, of few any three."""
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
        nodes: those of which each may be kept or computed again, with reason; a set has a bit for each.
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
        """Return the sets in which one of some segments is kept whole, or activations change places.

        Args:
            again: what is computed again.
            changes: which change places, one row for each set.
        """
        number = {node.name: i for i, node in enumerate(self.nodes)}
        whole = np.zeros((len(again), len(self.nodes)), bool)
        for row, segment in zip(whole, again, strict=True):
            row[[number[name] for name in segment.nodes if name in number]] = True
        kept = ~whole.any(axis=0)
        return np.concatenate([whole | kept, changes ^ kept])

    def price(self, sets: Any) -> tuple[Any, Any]:
        """Return the FLOPs that each set adds, and the bytes below which its peak cannot be.

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
    """Return what may be kept with reason.

    What one node alone reads, and no gradient, need not be kept where what that makes of it takes no more.
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


@dataclass(frozen=True)
class StageChoice:
    """What is computed again in one stage.

    Attributes:
        needs: of the stage.
        memory: tells its peaks.
        choice: the cheapest that fits.
    """

    needs: StageNeeds
    memory: StageMemory
    choice: RematChoice


def choose_by_stage(
    acts: Activations, step: StepRun, stages: Mapping[Node, int], given: Sequence[StageNeeds], remat: Remat
) -> list[StageChoice]:
    """Return the cheapest way to fit each device; stages of one device share it as they would use it.

    Args:
        acts: what may be computed again.
        step: a micro-batch of the whole model.
        stages: of the nodes.
        given: the stages, and what they hold.
        remat: the limit of a device, and in which stages something is computed again.

    Raises:
        PlanError: a stage does not fit; it says the least peak that was found.
    """
    assert remat.limit is not None
    memories = [StageMemory(acts, step, stages, needs) for needs in given]
    plain = [memory.peak(()) for memory in memories]
    found = []
    for i, needs in enumerate(given):
        beside = [j for j, other in enumerate(given) if other.device == needs.device]
        room = remat.limit - sum(memories[j].kept for j in beside)
        wanted = sum(plain[j] - memories[j].kept for j in beside)
        share = memories[i].kept + (room * (plain[i] - memories[i].kept) // wanted if wanted > room else room)
        part = _of_stage(acts, stages, needs.number)
        if not part.repeatable or (remat.stages and needs.number not in remat.stages):
            found.append(StageChoice(needs, memories[i], RematChoice((), 0.0, plain[i])))
            continue
        try:
            choice = choose(part, memories[i], share, remat.policy)
        except PlanError as error:
            raise PlanError(f"stage {needs.number} on {needs.device}: {error.problem}", hint=error.hint) from error
        found.append(StageChoice(needs, memories[i], choice))
    return found


def _of_stage(acts: Activations, stages: Mapping[Node, int], stage: int) -> Activations:
    forward = tuple(node for node in acts.forward if stages.get(node) == stage)
    return replace(acts, forward=forward, repeatable=acts.repeatable & frozenset(forward))


def device_peaks(
    chosen: Sequence[StageChoice], segments: Mapping[int, Sequence[Sequence[Node]]]
) -> dict[str, tuple[int, int]]:
    """Return the peak of each device, without and with what is computed again.

    Args:
        segments: by stage, the nodes of what is computed again.
    """
    found: dict[str, tuple[int, int]] = {}
    for one in chosen:
        before, after = found.get(one.needs.device, (0, 0))
        again = segments.get(one.needs.number, ())
        found[one.needs.device] = before + one.memory.peak(()), after + one.memory.peak(again)
    return found
