"""Compute connected groups and minimum cuts of networks.

A maximum flow gives the cut (Ford and Fulkerson 1956); it is found along shortest paths, all of one length together
(Dinic 1970): paths here are short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from autograph_rewrite.ir.traversal import Item, grouped, reachable

Residual = dict[Any, dict[Any, float]]
"""The capacity that is left from one node to another."""


def groups(items: Iterable[Item], pairs: Iterable[tuple[Item, Item]]) -> list[list[Item]]:
    """Return the items in groups that pairs connect, each in the order of the items."""
    parent = {item: item for item in items}

    def root(item: Item) -> Item:
        while (above := parent[item]) is not item:
            parent[item] = item = parent[above]
        return item

    for one, other in pairs:
        parent[root(other)] = root(one)
    return list(grouped((root(item), item) for item in parent).values())


def minimum_cut(edges: Mapping[tuple[Any, Any], float], source: Any, sink: Any) -> tuple[float, set[Any]]:
    """Return the capacity of a minimum cut, and the source's side of the one nearest to the sink.

    The capacity is infinite where no cut is finite.

    Args:
        edges: capacities by tail and head.
    """
    left: Residual = {source: {}, sink: {}}
    for (tail, head), capacity in edges.items():
        heads, back = left.setdefault(tail, {}), left.setdefault(head, {})
        heads[head] = heads.get(head, 0) + capacity
        back.setdefault(tail, 0)
    flow: float = 0
    while sink in (level := _levels(left, source)):
        flow += _sent(left, level, source, sink)
        if flow == math.inf:
            return flow, set()
    behind = reachable([sink], lambda head: [tail for tail in left[head] if left[tail][head]])
    return flow, left.keys() - behind.keys()


def _levels(left: Residual, source: Any) -> dict[Any, int]:
    """Return the distance from the source of each node that flow can still reach."""
    level, nodes = {source: 0}, [source]
    for node in nodes:
        for head, capacity in left[node].items():
            if capacity and head not in level:
                level[head] = level[node] + 1
                nodes.append(head)
    return level


def _sent(left: Residual, level: dict[Any, int], source: Any, sink: Any) -> float:
    """Send as much flow as shortest paths allow; return the amount."""
    heads = {node: iter(left[node]) for node in level}
    sent: float = 0
    path = [source]
    while path:
        node = path[-1]
        if node == sink:
            steps = list(pairwise(path))
            least = min(left[tail][head] for tail, head in steps)
            if least == math.inf:
                return least
            for tail, head in steps:
                left[tail][head] -= least
                left[head][tail] += least
            sent += least
            full = next(i for i, (tail, head) in enumerate(steps) if not left[tail][head])
            del path[full + 1 :]
            continue
        following = (head for head in heads[node] if left[node][head] and level.get(head) == level[node] + 1)
        if (head := next(following, None)) is not None:
            path.append(head)
        else:
            path.pop()
    return sent
