"""Kernels in the XSpace of TensorFlow's profiler: what ran from when to when.

sync     an event  name:op                                           on the thread that ran it
async    ExecutorState::ProcessAsync::Start, ...::Done               a collective or receive, paired by their id
step     an event with the name that whoever asked for it has given
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autograph_rewrite.ops.traits import has

KERNEL = re.compile(r"([^:\s]+):(_?[A-Za-z]\w*)")
_START, _DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
_NUMBERED = re.compile(r"(.+(?:/_|_S|_G))(\d+)")


class Kernel(NamedTuple):
    """One run of a node, in nanoseconds since the epoch, by the clock of its process."""

    name: str
    op: str
    start: int
    end: int
    route: tuple[str, str] | None = None


@dataclass
class Traced:
    """What a trace holds.

    Attributes:
        kernels: in no order.
        steps: start and end of each.
    """

    kernels: list[Kernel] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)


class _Event(NamedTuple):
    name: str
    start: int
    end: int
    stats: Mapping[str, Any]


def read(data: bytes, step: str) -> Traced:
    """Return the kernels and steps of a trace.

    Args:
        data: an encoded XSpace.
        step: name of the events that stand for steps.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(data)
    begin = _began(space)
    found = Traced()
    started: dict[Any, _Event] = {}
    done: dict[Any, _Event] = {}
    for plane in space.planes:
        for event in _events(plane, begin, step):
            if event.name == step:
                found.steps.append((event.start, event.end))
            elif event.name == _START:
                started[event.stats.get("_p"), event.stats.get("name")] = event
            elif event.name == _DONE:
                done[event.stats.get("_c"), event.stats.get("name")] = event
            else:
                name, op = KERNEL.fullmatch(event.name).groups()  # type: ignore[union-attr]
                if not has(op, "completes_later"):
                    found.kernels.append(Kernel(name, op, event.start, event.end, _route(event.stats.get("key"))))
    for key, event in started.items():
        if key in done:
            name, op = str(event.stats["name"]), str(event.stats["kernel_type"])
            found.kernels.append(Kernel(name, op, event.start, done[key].start))
    found.kernels[:] = _matched(found.kernels)
    found.steps.sort()
    return found


def _began(space: Any) -> int:
    """Return when the trace began: all times of it count from there."""
    for plane in space.planes:
        names = {number: one.name for number, one in plane.stat_metadata.items()}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return 0


def _events(plane: Any, begin: int, step: str) -> Iterator[_Event]:
    """Yield the events that matter."""
    names = {number: one.name for number, one in plane.event_metadata.items()}
    wanted = {n for n, name in names.items() if name in (step, _START, _DONE) or KERNEL.fullmatch(name)}
    stats = {number: one.name for number, one in plane.stat_metadata.items()}
    for line in plane.lines:
        first = begin + line.timestamp_ns
        for event in line.events:
            if event.metadata_id in wanted:
                start = first + event.offset_ps // 1000
                said = {stats[one.metadata_id]: _value(one, stats) for one in event.stats}
                yield _Event(names[event.metadata_id], start, start + event.duration_ps // 1000, said)


def _value(stat: Any, names: Mapping[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    return names[stat.ref_value] if kind == "ref_value" else getattr(stat, kind) if kind else None


def _route(key: Any) -> tuple[str, str] | None:
    """Return the devices of a rendezvous key: source;incarnation;target;edge;frame."""
    parts = str(key).split(";") if key else []
    return (parts[0], parts[2]) if len(parts) >= 3 else None


def _matched(kernels: list[Kernel]) -> Iterator[Kernel]:
    """Yield the kernels; a receive begins when the value is sent: before, nothing is on its way.

    TensorFlow names the receive of `x/_7` `x/_8`, and that of `x_S7` between processes `x_S8`.
    """
    sends: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        if has(kernel.op, "sends"):
            sends.setdefault(kernel.name, []).append(kernel)
    for kernel in kernels:
        numbered = _NUMBERED.fullmatch(kernel.name) if kernel.op.endswith("Recv") else None
        if numbered is not None:
            own = sends.get(f"{numbered[1]}{int(numbered[2]) - 1}", ())
            sent = next((one for one in own if kernel.start <= one.end and one.start <= kernel.end), None)
            yield kernel if sent is None else kernel._replace(start=max(kernel.start, sent.start), route=sent.route)
        else:
            yield kernel
