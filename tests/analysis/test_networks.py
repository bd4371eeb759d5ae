"""Minimum cuts and groups are those that networkx finds."""

from __future__ import annotations

import math
import random

import networkx
import pytest

from autograph_rewrite.analysis.networks import groups, minimum_cut


def _drawn(seed: int) -> dict[tuple[int, int], float]:
    """Return a network of at most fourteen nodes, with edges in both directions and some without a limit."""
    draw = random.Random(seed)
    count = draw.randint(2, 14)
    pairs = [tuple(draw.sample(range(count), 2)) for _ in range(draw.randint(1, 3 * count))]
    return {(tail, head): math.inf if draw.random() < 0.3 else draw.randint(0, 9) for tail, head in pairs}


@pytest.mark.parametrize("seeds", [range(at, at + 100) for at in range(0, 500, 100)])
def test_a_cut_is_the_one_of_networkx_nearest_to_the_sink(seeds: range) -> None:
    unlimited = 0
    for seed in seeds:
        edges = _drawn(seed)
        network = networkx.DiGraph()
        network.add_nodes_from((0, 1))
        for (tail, head), capacity in edges.items():
            network.add_edge(tail, head, **({} if capacity == math.inf else {"capacity": capacity}))
        try:
            capacity, (side, _) = networkx.minimum_cut(network, 0, 1)
        except networkx.NetworkXUnbounded:
            capacity, side = math.inf, set()
            unlimited += 1
        assert minimum_cut(edges, 0, 1) == (capacity, side), seed
    assert 0 < unlimited < len(seeds)


def test_without_a_way_nothing_is_cut() -> None:
    assert minimum_cut({("a", "b"): 3}, "a", "sink") == (0, {"a", "b"})


def test_groups_are_what_pairs_connect_each_in_the_order_of_the_items() -> None:
    assert groups("abcdef", [("e", "b"), ("d", "f"), ("b", "d")]) == [["a"], ["b", "d", "e", "f"], ["c"]]
