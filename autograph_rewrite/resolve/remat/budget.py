"""The policy budget:SIZE: the fewest FLOPs added for which the static peak of a device fits.

    few activations    every set of those that are kept, the cheapest first, until the peak of the step fits
    many               limits on a chain of cuts, by halves; then one kept activation more, less, or for another

What keeping a set costs, and a floor under the peak, `kept_sets` tells of many at once; `chain_budget` is the dynamic
programme over cuts, and `step_memory` says what peak the whole step has, gradients and branches included. All of it is
limited by counts, not by the clock, so that all processes of a job choose alike.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from autograph_rewrite.errors import PlanError
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.chain_search import look_by_halves
from autograph_rewrite.resolve.remat.kept_sets import KeptSets
from autograph_rewrite.resolve.remat.policies import connected
from autograph_rewrite.resolve.remat.search import Choice, Search, least
from autograph_rewrite.resolve.remat.step_memory import StepMemory

FEW = 16
"""Of how many activations every set is held against the budget."""
ROWS = 10_000
"""How many changes of a set are priced at a time, at most; of a large graph, fewer."""
WORK = 200_000
"""How many nodes a search looks at, about."""


def choose(acts: Activations, memory: StepMemory, limit: int, policy: str, before: int = 0) -> Choice:
    """Return the cheapest way to fit.

    Args:
        acts: what may be computed again.
        memory: of the step.
        limit: bytes of a device.
        policy: as the configuration names it.
        before: bytes of the step as it was given; 0: as it is without what is chosen here.

    Raises:
        PlanError: nothing fits; it says the least peak that was found.
    """
    search = Search(acts, memory)
    plain = search.look({})
    if plain.peak <= limit:
        return plain
    sets = KeptSets(acts, memory)
    cheapest, lowest = (_cheapest, _lowest) if len(sets.nodes) <= FEW else (_improved, _lowered)
    if (best := cheapest(search, sets, limit)) is not None:
        return best
    found = lowest(search, sets)  # whatever the limit is, so that what the error says does fit
    if found.peak <= limit:
        return found
    raise PlanError(
        f"remat.policy {policy}: a step takes at least {found.peak:,} B on a device with all that computing again can "
        f"save, of which {memory.kept:,} B are variables, inputs and constants; without it {before or plain.peak:,} B",
        hint=f"set budget to {found.peak} or more, or divide the batch by more micro-batches or replicas",
    )


def _looks(search: Search) -> int:
    """Return how many choices are looked at."""
    return max(4, WORK // max(1, search.memory.work))


def _keep(search: Search, sets: KeptSets, bits: Any) -> Choice:
    """Return what comes of keeping a set: each connected part of the rest is a segment."""
    kept = {node for node, keeps in zip(sets.nodes, bits, strict=True) if keeps}
    return search.look(connected(search.acts, kept))


def _cheapest(search: Search, sets: KeptSets, limit: int) -> Choice | None:
    """Return the choice of the fewest FLOPs that fits, of all."""
    rows = sets.all()
    flops, floors = sets.price(rows)
    order = np.lexsort((floors, flops))
    for row in rows[order[floors[order] <= limit][: _looks(search)]]:
        if search.settled(_keep(search, sets, row)).peak <= limit:
            break
    return search.fitting(limit)


def _lowest(search: Search, sets: KeptSets) -> Choice:
    """Return the choice of the least peak, of all."""
    rows = sets.all()
    flops, floors = sets.price(rows)
    best = search.look({})
    for i in np.lexsort((flops, floors))[: _looks(search)]:
        if floors[i] >= best.peak:
            break
        if (found := _keep(search, sets, rows[i])).peak < best.peak:
            best = least((best, search.settled(found)))
    return best


def _improved(search: Search, sets: KeptSets, limit: int) -> Choice | None:
    """Return the choice of the fewest FLOPs that fits, of those that are found from a chain of cuts."""
    look_by_halves(search, limit)
    start = search.fitting(limit) or search.settled(least(search.seen.values()))
    best = _descend(search, sets, start, limit)
    return best if best.peak <= limit else None


def _lowered(search: Search, sets: KeptSets) -> Choice:
    """Return the choice of the least peak, of those that are found from a chain of cuts."""
    fresh = Search(search.acts, search.memory)
    look_by_halves(fresh, 0)
    return _descend(fresh, sets, fresh.settled(least(fresh.seen.values())), 0)


def _descend(search: Search, sets: KeptSets, start: Choice, limit: int) -> Choice:
    """Return what small changes of a choice come to: of a smaller peak, or, where that fits, of fewer FLOPs."""
    looks, changes = _looks(search), _changes(len(sets.nodes), min(ROWS, 40 * WORK // search.memory.work))
    number = {node.name: i for i, node in enumerate(sets.nodes)}
    while looks > 0:
        again = start.again
        kept = np.array([node.name not in again for node in sets.nodes])
        whole = np.zeros((len(start.segments), len(kept)), bool)  # each segment kept
        for i, segment in enumerate(start.segments):
            whole[i, [number[name] for name in segment.nodes if name in number]] = True
        rows = np.concatenate([whole | kept, changes ^ kept])
        flops, floors = sets.price(rows)
        over, now = np.maximum(floors, limit), (max(start.peak, limit), start.flops)
        better = [i for i in np.lexsort((floors, flops, over)) if (over[i], flops[i]) < now]
        for i in better[:looks]:
            looks -= 1
            found = _keep(search, sets, rows[i])
            if (max(found.peak, limit), found.flops) < now:
                found = search.settled(found)
                if (max(found.peak, limit), found.flops) < now:
                    start = found
                    break
        else:
            break
    return start


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
