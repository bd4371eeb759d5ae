"""What one rank ran in measured steps: kernels and exchanges with their original nodes, in nanoseconds of its clock.

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
    """What ran.

    Attributes:
        node: its name in the rewritten graph, or what TensorFlow called it.
        device: as `CPU:0`; empty where nobody knows.
        origin: the original node that it is, is a copy of, or serves; empty for what is in no graph.
        made_by: the pass that made it; empty for a node of the original graph.
        exchange: of communication, what is exchanged, and for whom; else empty.
        meeting: of a collective, what its members on all ranks have in common; else empty.
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
    """One measured step, with the examples that this rank gave to it; 0: nobody knows."""

    start: int
    end: int
    examples: int = 0


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        clock: what ranks have in common that read the same clock.
        sources: what ran, each once.
        marks: start and end of exchanges outside of the steps that all ranks made together, in their order.
        flops: of one step of all ranks; 0: nobody knows.
    """

    rank: int
    clock: str
    steps: tuple[MeasuredStep, ...]
    sources: tuple[RunSource, ...]
    ran: tuple[Ran, ...]
    marks: tuple[tuple[int, int], ...] = ()
    flops: float = 0.0

    def shifted(self, by: int) -> RankTrace:
        """Return the trace by a clock that shows so many nanoseconds more."""
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
        """Return it as plain data, in columns; times since the first step."""
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


# Where the time of a step went, device by device: compute, communication that nothing hides, and idle.

HOST = "host"
NANO = 1e-9


@dataclass(frozen=True)
class DeviceTime:
    """One device of one rank, in seconds of one step.

    Attributes:
        device: as `CPU:0`; `host`: what no node of the graph has run.
        compute: that it computed.
        communication: that it exchanged something, or waited for it, and computed nothing.
        idle: the rest.
    """

    rank: int
    device: str
    compute: float
    communication: float
    idle: float


def device_times(trace: RankTrace, number: int) -> list[DeviceTime]:
    """Return where the time of one rank's devices went in one step."""
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
    """Return when something was computed in a step, and when something was exchanged."""
    inside = [(source, times) for source, times in ran if times[0] < step.end and times[1] > step.start]
    computed = union(within((times for source, times in inside if not source.exchange), *step[:2]))
    return computed, union(within((times for source, times in inside if source.exchange), *step[:2]))


@dataclass(frozen=True)
class Attributed:
    """Shares of a step's time, 0..1.

    Attributes:
        nodes: that original nodes ran, or what passes have made for them.
        communication: that only named exchanges took.
        other: that only what no node of the graph stands for ran: the runtime's own, or the data pipeline's.
        outside: of the program's step around the graph: nothing ran.
    """

    nodes: float
    communication: float
    other: float
    outside: float

    @property
    def share(self) -> float:
        """What is attributed to original nodes or named communication."""
        return self.nodes + self.communication


def attributed(traces: Sequence[RankTrace]) -> Attributed:
    """Return to what the time of the steps of all ranks is attributed, devices of a rank together."""
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


# Sets of times as sorted intervals that do not overlap: union, length, what is left of one without another.


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
    """Return the parts of intervals between two times."""
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


# Attribution: which original node, pass and exchange a kernel belongs to, by the name under which TensorFlow ran it.
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
    """What is known of the nodes of one rank.

    Args:
        items: rewritten or original, that ran; none of a program that is not distributed.
    """

    def __init__(self, items: Sequence[TrainingGraph] = ()) -> None:
        self._items = items

    def source(self, name: str, op: str, route: tuple[str, str] | None = None) -> RunSource:
        """Return what a kernel is.

        Args:
            name: under which TensorFlow ran it.
            route: of a send or receive, from which device to which, where that is known.
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
        """Return what a value's way from one device to another one is."""
        node = self._found(name)
        origin = name if node is None else self._original(node)
        if route is None and node is not None:
            route = node.device, self._reader(node)
        source, target = route or ("", "")
        way = f" from {_place(source)} to {_place(target)}" if source and target else ""
        device = device_of(source if op.endswith("Send") else target)
        return RunSource(name, op, device, origin if node is not None else "", "", f"send {origin}{way}")

    def _reader(self, node: Node) -> str:
        """Return the one other device, of this process if one is, that reads a node's values; else nothing."""
        found = {use.node.device for value in node.outputs for use in value.uses}
        found |= {user.device for user in node.control_users}
        found -= {node.device}
        own = {device for device in found if process_of(device) in self._processes} or found
        return own.pop() if len(own) == 1 else ""

    @cached_property
    def _processes(self) -> Collection[str]:
        """The process that this is, of a job."""
        reports = [item.report for item in self._items if item.report is not None and item.report.member is not None]
        return {f"/job:worker/replica:0/task:{report.member.task}" for report in reports}

    def _original(self, node: Node) -> str:
        origin = origin_of(node) if PASS_ATTR in node.attrs else node.name
        return self._renamed.get(origin, origin)

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        """The original names of nodes whose own only wait for them now."""
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
    """Return `CPU:0` of any name of that device: each rank has its own."""
    spec = device_specs.parse(text)
    return text if spec is None or not spec.kind else f"{spec.kind}:{spec.number or 0}"


def told(meeting: Meeting) -> str:
    """Return what is exchanged, how, and for whom, as a name."""
    owner = f" for {meeting.owner}" if meeting.owner else ""
    return f"{meeting.kind} {meeting.value}{owner}"


def _meetings(item: TrainingGraph) -> Iterable[Meeting]:
    if item.report is None and not any(PASS_ATTR in node.attrs for node in item.graph):
        return ()
    return meetings(item)


def _place(device: str) -> str:
    """Return `CPU:0`, or `ps 0 CPU:0` of another process."""
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
    yield from (parts[0], parts[0].rpartition("/")[0]) if len(parts) > 1 else ()  # the call that the node is within
