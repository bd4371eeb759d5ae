"""A profile: measured steps of all ranks by one clock, what they add up to, and what was predicted.

profile.save("trace.json")    Perfetto, chrome://tracing; `Profile.load` reads it again
print(profile)                step time, examples and FLOPs per second, devices, nodes, exchanges
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.profile import chrome_trace, tables
from autograph_rewrite.inspect.profile.device_time import NANO, Attributed, DeviceTime, attributed, device_times
from autograph_rewrite.inspect.profile.rank_trace import RankTrace

SCHEMA = 1
KEY = "autograph_rewrite"


@dataclass(frozen=True)
class Profile:
    """Measured steps.

    Attributes:
        ranks: traces of all ranks, by the clock of the first.
        offsets: how far the clocks of the ranks were off.
        predicted: the simulated step, as `inspect.report.overview.of_step` gives it; None where there is none.
        notes: what there is to know.
    """

    ranks: tuple[RankTrace, ...]
    offsets: tuple[Offset, ...]
    predicted: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, traces: Sequence[RankTrace], predicted: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> Profile:
        """Return the profile of traces by clocks of their own.

        Args:
            predicted: the simulated step.
            notes: what there is to know.

        Raises:
            GraphError: there is none, or they are not of the same steps.
        """
        if not traces:
            raise GraphError("nothing was profiled: no rank has left a trace")
        counts = {len(trace.steps) for trace in traces}
        if len(counts) > 1:
            raise GraphError(
                f"the ranks have traced different numbers of steps: {', '.join(map(str, sorted(counts)))}",
                hint="profile the same steps on every rank",
            )
        together, found = aligned(sorted(traces, key=lambda trace: trace.rank))
        unknown = [
            f"rank {one.rank}'s clock could not be compared: it is shown as it was"
            for one in found
            if one.error is None
        ]
        return cls(together, found, predicted, (*notes, *unknown))

    @cached_property
    def step_seconds(self) -> float:
        """The median over the steps of how long the slowest rank took."""
        return self._step_times[self.typical] * NANO

    @cached_property
    def typical(self) -> int:
        """The number of the step that took that long: what tables and figures of devices are about."""
        return self._step_times.index(statistics.median_low(self._step_times))

    @cached_property
    def _step_times(self) -> list[int]:
        own = ([step.end - step.start for step in trace.steps] for trace in self.ranks)
        return [max(one) for one in zip(*own, strict=True)]

    @cached_property
    def examples(self) -> int:
        """Examples of all ranks in one step, on average; 0: nobody knows."""
        return round(sum(statistics.fmean(step.examples for step in trace.steps) for trace in self.ranks))

    @property
    def examples_per_second(self) -> float:
        """Over all measured steps, with what the program did between them; 0: nobody knows."""
        first = min(trace.steps[0].start for trace in self.ranks)
        last = max(trace.steps[-1].end for trace in self.ranks)
        return self.examples * len(self.ranks[0].steps) / max(1, last - first) / NANO

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations outside of updates, per second of a step; 0: nobody knows."""
        return self.ranks[0].flops / self.step_seconds if self.step_seconds else 0.0

    @cached_property
    def devices(self) -> tuple[DeviceTime, ...]:
        """Where the time of each device went in the typical step."""
        return tuple(one for trace in self.ranks for one in device_times(trace, self.typical))

    @cached_property
    def attributed(self) -> Attributed:
        """Which share of the steps is that of original nodes, and of named communication."""
        return attributed(self.ranks)

    @property
    def exposed_seconds(self) -> float:
        """Of the typical step, on average of the devices: something is exchanged, and nothing computed."""
        return statistics.fmean([one.communication for one in self.devices] or [0.0])

    def figures(self) -> dict[str, Any]:
        """Return what the steps add up to, as plain data."""
        return {
            "steps": len(self.ranks[0].steps),
            "ranks": len(self.ranks),
            "step_seconds": self.step_seconds,
            "predicted_step_seconds": self.predicted["step_seconds"] if self.predicted else None,
            "examples": self.examples,
            "examples_per_second": self.examples_per_second,
            "flops_per_second": self.flops_per_second,
            "exposed_seconds": self.exposed_seconds,
            "attributed": {**vars(self.attributed), "share": self.attributed.share},
            "devices": tables.device_rows(self),
            "nodes": tables.node_rows(self),
            "exchanges": tables.exchange_rows(self),
            "clocks": [one._asdict() for one in self.offsets],
            "notes": list(self.notes),
        }

    def trace(self) -> dict[str, Any]:
        """Return the timeline as Perfetto and Chrome read it, with all that `load` needs."""
        kept = {
            "schema": SCHEMA,
            "ranks": [trace.data() for trace in self.ranks],
            "clocks": [list(one) for one in self.offsets],
            "predicted": self.predicted,
            "notes": list(self.notes),
        }
        return {"displayTimeUnit": "ms", "traceEvents": list(chrome_trace.events(self)), KEY: kept}

    def save(self, path: str | Path) -> Path:
        """Write the timeline, a JSON file for Perfetto, chrome://tracing and `load`."""
        write_whole(path, json.dumps(self.trace(), separators=(",", ":")).encode())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            GraphError: it is another file.
        """
        try:
            kept = json.loads(Path(path).read_text(encoding="utf-8"))[KEY]
        except (ValueError, KeyError, TypeError) as error:
            hint = "give the file that `autograph-rewrite profile` or Profile.save wrote"
            raise GraphError(f"{path} is no profile", hint=hint) from error
        ranks = tuple(RankTrace.of(one) for one in kept["ranks"])
        return cls(ranks, tuple(Offset(*one) for one in kept["clocks"]), kept["predicted"], tuple(kept["notes"]))

    def __str__(self) -> str:
        return tables.text(self)


# One clock for all ranks: no member of a collective is done before the last one has begun, by whichever clock.
#
#     rank 0    |-- all-reduce --|             begins at a, ends at b
#     rank 1        |-- all-reduce --|         begins at c, ends at d, by a clock that shows `offset` more
#
#     a <= d - offset,  c - offset <= b        so   c - b <= offset <= d - a
#
# Each exchange gives such bounds; the offset is in the middle of what all of them allow, its error half of that (as in
# Cristian, Probabilistic Clock Synchronization, 1989, with a collective for the round trip).


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
