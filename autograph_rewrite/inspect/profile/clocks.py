"""One clock for all ranks: no member of a collective is done before the last one has begun, by whichever clock.

    rank 0    |-- all-reduce --|             begins at a, ends at b
    rank 1        |-- all-reduce --|         begins at c, ends at d, by a clock that shows `offset` more

    a <= d - offset,  c - offset <= b        so   c - b <= offset <= d - a

Each exchange gives such bounds; the offset is in the middle of what all of them allow, its error half of that (as in
Cristian, Probabilistic Clock Synchronization, 1989, with a collective for the round trip).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from autograph_rewrite.inspect.profile.rank_trace import RankTrace


class Offset(NamedTuple):
    """What the clock of a rank shows more than that of the first one, in nanoseconds.

    Attributes:
        rank: whose clock.
        value: the offset.
        error: how far it may be off; None where nothing bounds it.
        is_same: both read the same clock, so that nothing had to be estimated.
    """

    rank: int
    value: int
    error: int | None
    is_same: bool = False


def offsets(traces: Sequence[RankTrace]) -> tuple[Offset, ...]:
    """Return the offset of each rank's clock to that of the first."""
    first = traces[0]
    return tuple(
        Offset(one.rank, 0, 0, is_same=True) if one.clock == first.clock else estimated(first, one) for one in traces
    )


def estimated(first: RankTrace, other: RankTrace) -> Offset:
    """Return the offset of another rank's clock by what both exchanged."""
    pairs = list(_met(first, other))
    low = max((begin - end for (_, end), (begin, _) in pairs), default=None)
    high = min((end - begin for (begin, _), (_, end) in pairs), default=None)
    if low is None or high is None:
        return Offset(other.rank, 0, None)
    return Offset(other.rank, (low + high) // 2, abs(high - low) // 2)


def aligned(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[Offset, ...]]:
    """Return the traces by the clock of the first rank, and how far the others' were off.

    Args:
        traces: of all ranks, at least one.
    """
    found = offsets(traces)
    return tuple(one.shifted(-by.value) if by.value else one for one, by in zip(traces, found, strict=True)), found


def _met(first: RankTrace, other: RankTrace) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    yield from zip(first.marks, other.marks, strict=False)
    ours, theirs = dict(meetings_of(first)), dict(meetings_of(other))
    for key in ours.keys() & theirs.keys():
        yield ours[key], theirs[key]


def meetings_of(trace: RankTrace) -> Iterable[tuple[tuple[int, str, int], tuple[int, int]]]:
    """Yield each collective, as step, name and count, with the time at which this rank's last member began and ended.

    A rank with several members has begun when all of them have, and is done when the first is.
    """
    members: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    for one in trace.ran:
        source = trace.sources[one.source]
        if source.meeting:
            step = next((i for i, step in enumerate(trace.steps) if step.start <= one.start <= step.end), -1)
            members.setdefault((step, source.meeting, source.node), []).append((one.start, one.end))
    found: dict[tuple[int, str, int], tuple[int, int]] = {}
    for (step, meeting, _), times in members.items():
        for count, (start, end) in enumerate(sorted(times)):
            before = found.get((step, meeting, count), (start, end))
            found[step, meeting, count] = max(start, before[0]), min(end, before[1])
    return ((key, value) for key, value in found.items() if key[0] >= 0)
