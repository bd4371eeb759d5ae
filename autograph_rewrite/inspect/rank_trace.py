"""Trace the measured steps of one rank: kernels and exchanges with their original nodes, in nanoseconds of its clock.

sources   replica_0/MatMul   MatMul              CPU:0   original MatMul   by expand
dw/all_reduce      CollectiveReduceV2  CPU:0   original dw       exchange dw:0, for w
ran       (0, 1000, 4200), (1, 4210, 5000), ...        place in sources, start, end
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from autograph_rewrite.inspect.communication import Meeting, meetings, origin_of
from autograph_rewrite.ir.graph import PASS_ATTR, Node
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph


class RunSource(NamedTuple):
    """A kernel or exchange that ran.

    Attributes:
        node: its name in the rewritten graph, or TensorFlow's name for it.
        device: as `CPU:0`; empty if it is not known.
        origin: its original node, or the one for which a pass made it; empty if it is in no graph.
        made_by: the pass that made it; empty for a node of the original graph.
        exchange: of communication, the exchanged value and its owner; else empty.
        meeting: of a collective, the key that its members on all ranks share; else empty.
    """

    node: str
    op: str
    device: str
    origin: str
    made_by: str = ""
    exchange: str = ""
    meeting: str = ""


class Ran(NamedTuple):
    """One run of a source."""

    source: int
    start: int
    end: int


class MeasuredStep(NamedTuple):
    """One measured step, with the examples of this rank; 0: not known."""

    start: int
    end: int
    examples: int = 0


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        clock: equal for ranks that read the same clock.
        sources: the kernels and exchanges, without repetition.
        marks: start and end of exchanges of all ranks outside of the steps, in order.
        flops: of one step of all ranks; 0: not known.
    """

    rank: int
    clock: str
    steps: tuple[MeasuredStep, ...]
    sources: tuple[RunSource, ...]
    ran: tuple[Ran, ...]
    marks: tuple[tuple[int, int], ...] = ()
    flops: float = 0.0

    def shifted(self, by: int) -> RankTrace:
        """Return the trace by a clock that is `by` nanoseconds ahead."""
        return replace(
            self,
            steps=tuple(step._replace(start=step.start + by, end=step.end + by) for step in self.steps),
            ran=tuple(Ran(one.source, one.start + by, one.end + by) for one in self.ran),
            marks=tuple((start + by, end + by) for start, end in self.marks),
        )

    def first(self, count: int) -> RankTrace:
        """Return the trace with the first steps only."""
        return replace(self, steps=self.steps[:count])

    def data(self) -> dict[str, Any]:
        """Return it as plain data, in columns; times are since the start of the first step."""
        begin = self.steps[0].start
        return {
            "rank": self.rank,
            "clock": self.clock,
            "begin": begin,
            "steps": [[step.start - begin, step.end - begin, step.examples] for step in self.steps],
            "sources": [list(source) for source in self.sources],
            "source": [one.source for one in self.ran],
            "start": [one.start - begin for one in self.ran],
            "length": [one.end - one.start for one in self.ran],
            "marks": [[start - begin, end - begin] for start, end in self.marks],
            "flops": self.flops,
        }

    @classmethod
    def of(cls, data: dict[str, Any]) -> RankTrace:
        """Return the trace that `data` describes."""
        begin = data["begin"]
        runs = zip(data["source"], data["start"], data["length"], strict=True)
        return cls(
            data["rank"],
            data["clock"],
            tuple(MeasuredStep(begin + start, begin + end, examples) for start, end, examples in data["steps"]),
            tuple(RunSource(*source) for source in data["sources"]),
            tuple(Ran(source, begin + start, begin + start + length) for source, start, length in runs),
            tuple((begin + start, begin + end) for start, end in data["marks"]),
            data["flops"],
        )


# The time of a step by device: compute, communication that no compute hides, and idle.

HOST = "host"
NANO = 1e-9


@dataclass(frozen=True)
class DeviceTime:
    """One device of one rank, in seconds of one step.

    Attributes:
        device: as `CPU:0`.
        compute: time that it computed.
        communication: time that it exchanged values, or waited for them, and computed nothing.
        idle: the rest.
    """

    rank: int
    device: str
    compute: float
    communication: float
    idle: float


def device_times(trace: RankTrace, number: int) -> list[DeviceTime]:
    """Return the times of one rank's devices in one step."""
    devices = sorted({source.device for source in trace.sources if source.device and source.origin})
    return [_device_time(trace, trace.steps[number], device) for device in devices]


def _device_time(trace: RankTrace, step: MeasuredStep, device: str) -> DeviceTime:
    own = [(trace.sources[one.source], (one.start, one.end)) for one in trace.ran]
    on_device = [(source, times) for source, times in own if source.device == device]
    computed, exchanged = computed_and_exchanged(on_device, step)
    compute, communication = length(computed), length(without(exchanged, computed))
    idle = step.end - step.start - compute - communication
    return DeviceTime(trace.rank, device, compute * NANO, communication * NANO, idle * NANO)


def computed_and_exchanged(
    ran: Iterable[tuple[RunSource, Interval]], step: MeasuredStep
) -> tuple[list[Interval], list[Interval]]:
    """Return the intervals of a step in which something was computed, and those in which something was exchanged."""
    inside = [(source, times) for source, times in ran if times[0] < step.end and times[1] > step.start]
    computed = union(within((times for source, times in inside if not source.exchange), *step[:2]))
    return computed, union(within((times for source, times in inside if source.exchange), *step[:2]))


@dataclass(frozen=True)
class Attributed:
    """Shares of a step's time, 0..1.

    Attributes:
        nodes: original nodes, or nodes that passes made for them, computed.
        communication: only named exchanges ran.
        other: only kernels that are in no graph ran, of the runtime or the data pipeline.
        outside: nothing ran.
    """

    nodes: float
    communication: float
    other: float
    outside: float

    @property
    def share(self) -> float:
        """The share of original nodes and named communication."""
        return self.nodes + self.communication


def attributed(traces: Sequence[RankTrace]) -> Attributed:
    """Return the shares of the steps' time of all ranks, taking the devices of a rank together."""
    spent, whole = [0, 0, 0], 0
    for trace in traces:
        ran = [(trace.sources[one.source], (one.start, one.end)) for one in trace.ran]
        for step in trace.steps:
            known, exchanged = computed_and_exchanged([one for one in ran if one[0].origin], step)
            rest, _ = computed_and_exchanged([one for one in ran if not one[0].origin], step)
            named = union([*known, *exchanged])
            spent[0] += length(known)
            spent[1] += length(named) - length(known)
            spent[2] += length(without(rest, named))
            whole += step.end - step.start
    nodes, communication, other = (part / max(1, whole) for part in spent)
    return Attributed(nodes, communication, other, 1 - nodes - communication - other)


# Sets of times as sorted, disjoint intervals: union, length, difference.


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
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def within(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """Return the parts of intervals between two times."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def without(times: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times of one set that are not in another one; both sorted and disjoint."""
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


# Attribution: find the original node, pass and exchange of a kernel by its name in TensorFlow's trace.
#
# replica_0/MatMul                         a copy of MatMul
# dw/all_reduce                            an exchange of dw:0
# dw/_7 (_Send), dw/_8 (_Recv)             dw, from one device to another
# while/body/_12/while/mul                 mul in a function that TensorFlow has inlined; else the loop itself
# ConstantFolding/a-folded-0               a, folded by Grappler; fused kernels keep the name of their last node

_NUMBERED = re.compile(r"(?:/_|_[SG])\d+$")
_INLINED = re.compile(r"/_\d+/")
_GRAPPLER = re.compile(r"^(?:ConstantFolding/|[A-Za-z]+Optimizer/){1,100}(?:[A-Z][A-Za-z]+_)?")
_FOLDED = re.compile(r"(?:-folded)?-\d+$|-[A-Za-z0-9]+-LayoutOptimizer$|_arg$|/eval_\d+$")


class Attribution:
    """Finds the sources of one rank's kernels.

    Args:
        items: the rewritten or original items that ran; empty for a program that is not distributed.
    """

    def __init__(self, items: Sequence[TrainingGraph] = ()) -> None:
        self._items = items

    def source(self, name: str, op: str, route: tuple[str, str] | None = None) -> RunSource:
        """Return the source of a kernel.

        Args:
            name: of the kernel in TensorFlow's trace.
            route: source and target device of a send or receive, if they are known.
        """
        if has(op, "sends", "receives"):
            return self._moved(_NUMBERED.sub("", name), op, route)
        if not self._items:
            return RunSource(name, op, "", name)
        node = self._found(name)
        if node is None:
            return RunSource(name, op, "", "")
        made_by = node.attr(PASS_ATTR, b"").decode()
        origin = self._original(node)
        meeting = self._meetings.get(node.name)
        exchange = told(meeting) if meeting is not None else ""
        met = f"{meeting.order} {meeting.value}" if meeting is not None and meeting.order is not None else ""
        return RunSource(node.name, op, device_of(node.device), origin, made_by, exchange, met)

    def _moved(self, name: str, op: str, route: tuple[str, str] | None) -> RunSource:
        """Return the source of a send or receive."""
        node = self._found(name)
        origin = name if node is None else self._original(node)
        if route is None and node is not None:
            route = node.device, self._reader(node)
        source, target = route or ("", "")
        way = f" from {_place(source)} to {_place(target)}" if source and target else ""
        device = device_of(source if op.endswith("Send") else target)
        return RunSource(name, op, device, origin if node is not None else "", "", f"send {origin}{way}")

    def _reader(self, node: Node) -> str:
        """Return the device to which a node's values are sent, if it is the only one (in this process); else ""."""
        found = {use.node.device for value in node.outputs for use in value.uses}
        found |= {user.device for user in node.control_users}
        found -= {node.device}
        own = {device for device in found if process_of(device) in self._processes} or found
        return own.pop() if len(own) == 1 else ""

    @cached_property
    def _processes(self) -> Collection[str]:
        """The device prefix of this process in its job; empty if it is no worker."""
        reports = [item.report for item in self._items if item.report is not None and item.report.member is not None]
        return {f"/job:worker/replica:0/task:{report.member.task}" for report in reports}

    def _original(self, node: Node) -> str:
        origin = origin_of(node) if PASS_ATTR in node.attrs else node.name
        return self._renamed.get(origin, origin)

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        """The original names of nodes that had to give their names to nodes that wait for them."""
        layouts = [item.layout for item in self._items if item.layout is not None]
        return {new: old for layout in layouts for old, new in layout.moved.items()}

    def _found(self, name: str) -> Node | None:
        for candidate in _candidates(name):
            for item in self._items:
                node = item.graph.nodes.get(candidate)
                if node is not None:
                    return node
        return None

    @cached_property
    def _meetings(self) -> Mapping[str, Meeting]:
        return {member: one for item in self._items for one in _meetings(item) for member in one.members}


def device_of(text: str) -> str:
    """Return `CPU:0` for any full name of the device."""
    spec = device_specs.parse(text)
    return text if spec is None or not spec.kind else f"{spec.kind}:{spec.number or 0}"


def told(meeting: Meeting) -> str:
    """Return a name for an exchange: its kind, value and owner."""
    owner = f" for {meeting.owner}" if meeting.owner else ""
    return f"{meeting.kind} {meeting.value}{owner}"


def _meetings(item: TrainingGraph) -> Iterable[Meeting]:
    if item.report is None and not any(PASS_ATTR in node.attrs for node in item.graph):
        return ()
    return meetings(item)


def _place(device: str) -> str:
    """Return `CPU:0`, or `ps 0 CPU:0` for a device of a job."""
    spec = device_specs.parse(device)
    process = f"{spec.job} {spec.task or 0} " if spec is not None and spec.job not in ("", "localhost") else ""
    return process + device_of(device)


def _candidates(name: str) -> Iterator[str]:
    """Yield the names of the graph that a node may have had, the likeliest first."""
    yield name
    plain = _NUMBERED.sub("", name)
    yield plain
    parts = _INLINED.split(plain)
    for first in range(1, len(parts)):
        yield "/".join(parts[first:])
    yield _FOLDED.sub("", _GRAPPLER.sub("", plain))
    yield from (parts[0], parts[0].rpartition("/")[0]) if len(parts) > 1 else ()  # the call of the inlined function
