"""A profile as events for Perfetto and chrome://tracing: a process per rank, rows per device, and the prediction.

rank 0    steps                       1        2
          CPU:0                       MatMul   Relu
          CPU:0 exchanges                           CollectiveReduceV2 dw:0 for w
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autograph_rewrite.inspect.profile.device_time import HOST
from autograph_rewrite.inspect.profile.rank_trace import RankTrace, Source

if TYPE_CHECKING:
    from autograph_rewrite.inspect.profile.profile import Profile

COMMUNICATION = " exchanges"
OTHER = "not in the graph"


def lane_of(source: Source) -> str:
    """Return the lane on which a source is shown."""
    if not source.origin:
        return OTHER
    return (source.device or HOST) + (COMMUNICATION if source.exchange else "")


def events(profile: Profile) -> Iterator[Mapping[str, Any]]:
    """Yield the events of all ranks, in microseconds since the first step."""
    begin = min(trace.steps[0].start for trace in profile.ranks)
    for trace in profile.ranks:
        yield from _of_rank(trace, begin)
    if profile.predicted is not None:
        yield from _predicted(profile.predicted, len(profile.ranks))


def rows_of(times: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int]]:
    """Yield lane and row for each of (lane, start, end), sorted by start: what overlaps is in rows of its own."""
    free: dict[str, list[int]] = {}
    for lane, start, end in times:
        rows = free.setdefault(lane, [])
        row = next((number for number, busy in enumerate(rows) if busy <= start), len(rows))
        rows[row : row + 1] = [end]
        yield lane, row


def _of_rank(trace: RankTrace, begin: int) -> Iterator[Mapping[str, Any]]:
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
