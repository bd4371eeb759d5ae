"""Sets of times as sorted intervals that do not overlap: union, length, what is left of one without another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in any of the intervals."""
    found: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Return how long the intervals of a union are together."""
    return sum(end - start for start, end in intervals)


def within(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """Return the parts of intervals between two times.

    Args:
        intervals: in any order.
        start: the earlier time.
        end: the later one.
    """
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def without(times: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times of one union that are not in another one."""
    found: list[Interval] = []
    at = 0
    for start, end in times:
        while at < len(others) and others[at][1] <= start:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            if others[index][0] > start:
                found.append((start, others[index][0]))
            start = max(start, others[index][1])
            index += 1
        if start < end:
            found.append((start, end))
    return found
