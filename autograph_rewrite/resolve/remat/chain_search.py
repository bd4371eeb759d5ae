"""A chain of cuts as the start of a search for a budget: limits on what the chain keeps, by halves.

    limit of the chain    80 MiB   120 MiB   100 MiB   110 MiB
    peak of the step      fits     too much  fits      too much
    FLOPs added           300      -         200       -

The dynamic programme of `chain_budget` chooses for a limit on what a chain of cuts keeps; the search says what peak the
whole step then has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.chain_budget import Costs, Part, least_flops
from autograph_rewrite.resolve.remat.cuts import Place, candidates, chain_of
from autograph_rewrite.resolve.remat.search import Search
from autograph_rewrite.resolve.remat.step_memory import StepMemory
from autograph_rewrite.resolve.stages.flops import cost_of

MAX_STOPS = 64
HALVINGS = 8


def look_by_halves(search: Search, limit: int) -> None:
    """Look for the largest limit of the chain with which the whole step fits, or else for the least there is."""
    acts = search.acts
    places = candidates(chain_of(acts, search.memory.nbytes), MAX_STOPS)
    costs = costs_of(acts, search.memory, places)
    low, high = 0.0, float(costs.kept.sum())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        parts = least_flops(costs, middle)
        if parts is None or search.look(_numbers(acts, places, parts)).peak <= limit:
            low = middle
        else:
            high = middle


def _numbers(acts: Activations, places: Sequence[Place], parts: Iterable[Part]) -> dict[Node, int]:
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
