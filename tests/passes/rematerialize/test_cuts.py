"""Where a chain is cut: the least that is kept and made at a time, compared with every other way to cut it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from autograph_rewrite.resolve.remat.policies import Chain, CrossingNode, CutPlace, balanced_cuts

Layers = Sequence[tuple[int, int]]


def chain(layers: Layers) -> Chain:
    """Return a chain of layers: bytes that are kept today, and bytes that cross behind each."""
    before, places = 0.0, []
    for i, (kept, crosses) in enumerate(layers):
        before += kept
        places.append(CutPlace(i + 1, (CrossingNode(i, None, crosses),), crosses, before))  # type: ignore[arg-type]
    return Chain(tuple(places[:-1]), before)


def peak(layers: Layers, cuts: Sequence[int]) -> int:
    stops = [0, *cuts, len(layers)]
    parts = [sum(kept for kept, _ in layers[a:b]) for a, b in itertools.pairwise(stops)]
    return sum(layers[cut - 1][1] for cut in cuts) + max(parts)


def test_sixty_four_equal_layers_are_cut_into_about_eight_parts() -> None:
    layers = [(1, 1)] * 64
    cuts = balanced_cuts(chain(layers))
    assert 6 <= len(cuts) <= 10
    assert peak(layers, cuts) <= 16


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_to_cut_a_short_chain_is_much_better(seed: int) -> None:
    dice = random.Random(seed)
    layers = [(dice.randint(1, 9), dice.randint(1, 6)) for _ in range(dice.randint(2, 11))]
    places = range(1, len(layers))
    best = min(peak(layers, cuts) for n in range(len(layers)) for cuts in itertools.combinations(places, n))
    found = peak(layers, balanced_cuts(chain(layers)))
    assert best <= found <= 1.05 * best


def test_a_cut_is_moved_to_where_less_crosses() -> None:
    layers = [(4, 9), (4, 9), (4, 1), (4, 9), (4, 9), (4, 9)]
    assert balanced_cuts(chain(layers)) == [3]
