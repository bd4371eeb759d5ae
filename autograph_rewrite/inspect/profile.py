"""Combine the measured steps of all ranks into a profile: one clock, sums, and the prediction next to them.

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

from autograph_rewrite.cost.tasks.result import rows_of
from autograph_rewrite.diagnostics.amounts import duration, several
from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect import rank_trace
from autograph_rewrite.inspect.table import drawn, table

SCHEMA = 1
KEY = "autograph_rewrite"


@dataclass(frozen=True)
class Profile:
    """Measured steps.

    Attributes:
        ranks: traces of all ranks, by the clock of the first.
        offsets: the offsets of the ranks' clocks.
        predicted: the simulated step, from `inspect.report.of_step`; None if there is none.
    """

    ranks: tuple[rank_trace.RankTrace, ...]
    offsets: tuple[Offset, ...]
    predicted: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        traces: Sequence[rank_trace.RankTrace],
        predicted: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> Profile:
        """Return the profile of traces, each by the clock of its rank.

        Raises:
            GraphError: there are no traces, or they have different numbers of steps.
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
        """The median over the steps of the slowest rank's time."""
        return self._step_times[self.typical] * rank_trace.NANO

    @cached_property
    def typical(self) -> int:
        """The number of the step with that time, which the tables and figures of devices describe."""
        return self._step_times.index(statistics.median_low(self._step_times))

    @cached_property
    def _step_times(self) -> list[int]:
        own = ([step.end - step.start for step in trace.steps] for trace in self.ranks)
        return [max(one) for one in zip(*own, strict=True)]

    @cached_property
    def examples(self) -> int:
        """Examples of all ranks in one step, on average; 0: not known."""
        return round(sum(statistics.fmean(step.examples for step in trace.steps) for trace in self.ranks))

    @property
    def examples_per_second(self) -> float:
        """Over all measured steps, including the time between them; 0: not known."""
        first = min(trace.steps[0].start for trace in self.ranks)
        last = max(trace.steps[-1].end for trace in self.ranks)
        return self.examples * len(self.ranks[0].steps) / max(1, last - first) / rank_trace.NANO

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations outside of updates, per second of a step; 0: not known."""
        return self.ranks[0].flops / self.step_seconds if self.step_seconds else 0.0

    @cached_property
    def devices(self) -> tuple[rank_trace.DeviceTime, ...]:
        """The time of each device in the typical step."""
        return tuple(one for trace in self.ranks for one in rank_trace.device_times(trace, self.typical))

    @cached_property
    def attributed(self) -> rank_trace.Attributed:
        """The shares of the steps' time of original nodes and of named communication."""
        return rank_trace.attributed(self.ranks)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the typical step in which a device exchanges and does not compute, on average over the devices."""
        return statistics.fmean([one.communication for one in self.devices] or [0.0])

    def figures(self) -> dict[str, Any]:
        """Return all figures as plain data."""
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
            "devices": device_rows(self),
            "nodes": node_rows(self),
            "exchanges": exchange_rows(self),
            "clocks": [one._asdict() for one in self.offsets],
            "notes": list(self.notes),
        }

    def trace(self) -> dict[str, Any]:
        """Return the timeline in the format of Perfetto and Chrome, with all data that `load` needs."""
        kept = {
            "schema": SCHEMA,
            "ranks": [trace.data() for trace in self.ranks],
            "clocks": [list(one) for one in self.offsets],
            "predicted": self.predicted,
            "notes": list(self.notes),
        }
        return {"displayTimeUnit": "ms", "traceEvents": list(events(self)), KEY: kept}

    def save(self, path: str | Path) -> Path:
        """Write the timeline, a JSON file for Perfetto, chrome://tracing and `load`."""
        write_whole(path, json.dumps(self.trace(), separators=(",", ":")).encode())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            GraphError: the file is no profile.
        """
        try:
            kept = json.loads(Path(path).read_text(encoding="utf-8"))[KEY]
        except (ValueError, KeyError, TypeError) as error:
            hint = "give the file that `autograph-rewrite profile` or Profile.save wrote"
            raise GraphError(f"{path} is no profile", hint=hint) from error
        ranks = tuple(rank_trace.RankTrace.of(one) for one in kept["ranks"])
        return cls(ranks, tuple(Offset(*one) for one in kept["clocks"]), kept["predicted"], tuple(kept["notes"]))

    def __str__(self) -> str:
        return text(self)


# One clock for all ranks: no member of a collective ends before the last one has begun.
#
#     rank 0    |-- all-reduce --|             begins at a, ends at b
#     rank 1        |-- all-reduce --|         begins at c, ends at d, by a clock that is `offset` ahead
#
#     a <= d - offset,  c - offset <= b        so   c - b <= offset <= d - a
#
# Each exchange gives such bounds. The estimate is the middle of the interval that all bounds allow, its error half of
# the interval (as in Cristian, Probabilistic Clock Synchronization, 1989, with a collective for the round trip).


class Offset(NamedTuple):
    """How far the clock of a rank is ahead of that of the first one, in nanoseconds.

    Attributes:
        error: the largest error of `value`; None if there are no bounds.
        is_same: both ranks read the same clock, so that nothing had to be estimated.
    """

    rank: int
    value: int
    error: int | None
    is_same: bool = False


def estimated(first: rank_trace.RankTrace, other: rank_trace.RankTrace) -> Offset:
    """Return the offset of another rank's clock, estimated from common exchanges."""
    pairs = list(_met(first, other))
    low = max((begin - end for (_, end), (begin, _) in pairs), default=None)
    high = min((end - begin for (begin, _), (_, end) in pairs), default=None)
    if low is None or high is None:
        return Offset(other.rank, 0, None)
    return Offset(other.rank, (low + high) // 2, abs(high - low) // 2)


def aligned(traces: Sequence[rank_trace.RankTrace]) -> tuple[tuple[rank_trace.RankTrace, ...], tuple[Offset, ...]]:
    """Return the traces by the clock of the first rank, and the offsets of the ranks' clocks.

    Args:
        traces: of all ranks, at least one.
    """
    first = traces[0]
    found = tuple(
        Offset(one.rank, 0, 0, is_same=True) if one.clock == first.clock else estimated(first, one) for one in traces
    )
    return tuple(one.shifted(-by.value) if by.value else one for one, by in zip(traces, found, strict=True)), found


def _met(first: rank_trace.RankTrace, other: rank_trace.RankTrace) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    yield from zip(first.marks, other.marks, strict=False)
    ours, theirs = dict(meetings_of(first)), dict(meetings_of(other))
    for key in ours.keys() & theirs.keys():
        yield ours[key], theirs[key]


def meetings_of(trace: rank_trace.RankTrace) -> Iterable[tuple[tuple[int, str, int], tuple[int, int]]]:
    """Return the collectives, as step, name and count, with the times at which this rank began and ended each.

    A rank with several members has begun when all of them have, and has ended when the first has.
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


# A profile as tables: measured and predicted time by device, the slowest original nodes, the exchanges.

SHOWN = 15
_UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (0.0, "FLOP/s"))


def device_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return the compute, communication and idle seconds of each device, with the predicted ones."""
    return [{**vars(one), "predicted": _foretold(profile, one)} for one in profile.devices]


def _foretold(profile: Profile, device: rank_trace.DeviceTime) -> dict[str, float] | None:
    """Return the prediction for a device, by its position within its rank, because all ranks do the same."""
    step = profile.predicted
    if step is None:
        return None
    place = [one for one in profile.devices if one.rank == device.rank].index(device)
    lanes = [one for one in step["devices"] if one["busy_seconds"]] or step["devices"]
    if not lanes:
        return None
    busy = lanes[min(place, len(lanes) - 1)]["busy_seconds"]
    idle = max(0.0, step["step_seconds"] - busy - step["exposed_seconds"])
    return {"compute": busy, "communication": step["exposed_seconds"], "idle": idle}


def node_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return the seconds of original nodes in the typical step, summed over all devices, the slowest first."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for trace in profile.ranks:
        for source, seconds in _spent_by(trace, profile.typical):
            if not source.exchange and source.origin:
                one = found.setdefault((source.origin, source.op, source.made_by), [0.0, 0])
                one[0] += seconds
                one[1] += 1
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [
        {"node": node, "op": op, "pass": made_by, "seconds": seconds, "runs": int(count)}
        for (node, op, made_by), (seconds, count) in ordered
    ]


def exchange_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return the mean seconds of exchanges in the typical step, with their members, the slowest first."""
    found: dict[tuple[str, str], list[float]] = {}
    members: dict[tuple[str, str], set[tuple[int, str]]] = {}
    for trace in profile.ranks:
        for source, seconds in _spent_by(trace, profile.typical):
            if source.exchange:
                found.setdefault((source.exchange, source.origin), []).append(seconds)
                members.setdefault((source.exchange, source.origin), set()).add((trace.rank, source.device))
    return sorted(
        (
            {
                "exchange": name,
                "node": origin,
                "seconds": sum(seconds) / len(seconds),
                "longest": max(seconds),
                "members": len(members[name, origin]),
            }
            for (name, origin), seconds in found.items()
        ),
        key=lambda row: -row["seconds"],
    )


def _spent_by(trace: rank_trace.RankTrace, number: int) -> Iterator[tuple[rank_trace.RunSource, float]]:
    step = trace.steps[number]
    for one in trace.ran:
        if step.start <= one.start <= step.end:
            yield trace.sources[one.source], (one.end - one.start) * rank_trace.NANO


def text(profile: Profile) -> str:
    """Return figures and tables."""
    part, predicted = profile.attributed, profile.predicted
    steps = several(len(profile.ranks[0].steps), "step")
    foretold = f" (predicted: {duration(predicted['step_seconds'])})" if predicted else ""
    said = [f"{steps} on {several(len(profile.ranks), 'rank')}: {duration(profile.step_seconds)} each{foretold}"]
    if profile.examples:
        said.append(f"{profile.examples_per_second:,.0f} examples/s")
    if profile.flops_per_second:
        unit, name = next(one for one in _UNITS if profile.flops_per_second >= one[0])
        said.append(f"{profile.flops_per_second / (unit or 1):.2f} {name}")
    lines = [
        ", ".join(said),
        f"{part.share:.1%} of the time is that of original nodes ({part.nodes:.1%}) or of named communication alone "
        f"({part.communication:.1%}); {part.other:.1%} runs outside of the graph, in {part.outside:.1%} nothing runs",
        "",
    ]
    devices = []
    for row in device_rows(profile):
        also = row["predicted"] or {}
        cells = [_time(row[key]) if which == 0 else _time(also.get(key)) for key in _TIMES for which in (0, 1)]
        devices.append((row["rank"], row["device"], *cells))
    nodes = [
        (row["node"], row["op"], row["pass"], row["runs"], _time(row["seconds"])) for row in node_rows(profile)[:SHOWN]
    ]
    exchanges = [
        (row["exchange"], row["members"], _time(row["seconds"]), _time(row["longest"]))
        for row in exchange_rows(profile)[:SHOWN]
    ]
    columns = ("rank", "device", *(f"#{key}{also}" for key in _TIMES for also in ("", ", predicted")))
    shown = [
        table("the typical step", columns, devices),
        table("original nodes", ("node", "kernel", "made by", "#runs", "#time"), nodes),
        table("communication", ("exchange", "#members", "#time", "#longest"), exchanges),
    ]
    nano = rank_trace.NANO
    clocks = [
        f"clock of rank {one.rank}: {duration(one.value * nano)}, known to {duration(one.error * nano)}"
        for one in profile.offsets
        if not one.is_same and one.error is not None
    ]
    return "\n".join([*lines, drawn(*shown).rstrip(), *clocks, *(f"note: {note}" for note in profile.notes)]) + "\n"


_TIMES = ("compute", "communication", "idle")


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


# A profile as events for Perfetto and chrome://tracing: a process per rank with rows per device, and the prediction.
#
# rank 0    steps                       1        2
#           CPU:0                       MatMul   Relu
#           CPU:0 exchanges                           CollectiveReduceV2 dw:0 for w

COMMUNICATION = " exchanges"
OTHER = "not in the graph"


def lane_of(source: rank_trace.RunSource) -> str:
    """Return the lane on which a source is shown."""
    if not source.origin:
        return OTHER
    return (source.device or rank_trace.HOST) + (COMMUNICATION if source.exchange else "")


def events(profile: Profile) -> Iterator[Mapping[str, Any]]:
    """Yield the events of all ranks, in microseconds since the first step."""
    begin = min(trace.steps[0].start for trace in profile.ranks)
    for trace in profile.ranks:
        yield from _of_rank(trace, begin)
    if profile.predicted is not None:
        yield from _predicted(profile.predicted, len(profile.ranks))


def _of_rank(trace: rank_trace.RankTrace, begin: int) -> Iterator[Mapping[str, Any]]:
    yield _named("process_name", trace.rank, 0, f"rank {trace.rank}")
    yield _named("thread_name", trace.rank, 0, "steps")
    for number, step in enumerate(trace.steps):
        yield _event(f"step {number}", "step", (trace.rank, 0), (step.start - begin, step.end - begin))
    sources = [(trace.sources[one.source], one.start, one.end) for one in trace.ran]
    lanes = sorted({lane_of(source) for source, _, _ in sources})
    threads: dict[tuple[str, int], int] = {}
    for (source, start, end), place in zip(
        sources, rows_of((lane_of(source), start, end) for source, start, end in sources), strict=True
    ):
        if place not in threads:
            threads[place] = lanes.index(place[0]) * 1000 + place[1] + 1
            yield _named("thread_name", trace.rank, threads[place], place[0])
        kind = "communication" if source.exchange else "compute" if source.origin else "other"
        name = source.exchange or f"{source.op} {source.origin or source.node}"
        said = {"node": source.node, "op": source.op, "original node": source.origin, "made by pass": source.made_by}
        args = {key: value for key, value in said.items() if value}
        yield _event(name, kind, (trace.rank, threads[place]), (start - begin, end - begin), args)


def _predicted(step: Mapping[str, Any], process: int) -> Iterator[Mapping[str, Any]]:
    yield _named("process_name", process, 0, "predicted step")
    found = step["events"]
    columns = zip(*(found[key] for key in ("name", "lane", "kind", "start", "seconds")), strict=True)
    ran = sorted((start, lane, name, kind, seconds) for name, lane, kind, start, seconds in columns)
    times = ((str(lane), int(start * 1e3), int((start + seconds) * 1e3)) for start, lane, _, _, seconds in ran)
    threads: dict[tuple[str, int], int] = {}
    for (start, lane, name, kind, seconds), place in zip(ran, rows_of(times), strict=True):
        if place not in threads:
            threads[place] = lane * 1000 + place[1] + 1
            yield _named("thread_name", process, threads[place], found["lanes"][lane])
        span = int(start * 1e3), int((start + seconds) * 1e3)
        yield _event(found["names"][name], found["kinds"][kind], (process, threads[place]), span)


def _event(
    name: str, kind: str, place: tuple[int, int], span: tuple[int, int], args: Mapping[str, str] | None = None
) -> Mapping[str, Any]:
    start, end = span
    made = {"name": name, "cat": kind, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3}
    return {**made, "pid": place[0], "tid": place[1], **({"args": args} if args else {})}


def _named(what: str, process: int, thread: int, name: str) -> Mapping[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
