"""Trace the steps of distributed functions and sessions, on all ranks of their job."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.cost.hardware.calibrate import calibrate
from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.cost.simulate import simulate
from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.errors import GraphError, RewriteError
from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.inspect.rank_trace import Attribution, MeasuredStep, Ran, RankTrace, RunSource
from autograph_rewrite.inspect.report import of_step
from autograph_rewrite.ops.traits import has
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.exchanges import Rendezvous
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.runtime.engine.step_observers import StepObserver


class Observed(Protocol):
    """A distributed function or session, which reports its steps to an observer."""

    observer: StepObserver | None


class Recording:
    """A recording of steps, begun by the constructor; all ranks begin and end it together.

    Args:
        observed: the functions or sessions whose steps are recorded; each has run before.

    Attributes:
        tracer: observes every step.

    Raises:
        GraphError: TensorFlow's profiler is running already.
        ClusterError: a rank is missing.
    """

    def __init__(self, observed: Sequence[Observed], items: Sequence[TrainingGraph]) -> None:
        self._observed = [(one, one.observer) for one in observed]
        self.ranks = Ranks(items)
        self._marks = self.ranks.meet()
        self.tracer = Tracer()
        self.tracer.start()
        for one in observed:
            one.observer = self.tracer

    def cancel(self) -> None:
        """End the recording, and discard it."""
        self._let_go()
        self.tracer.cancel()

    def end(self, original: TrainingGraph | None = None, machine: Machine | None = None) -> Profile:
        """End the recording, and return the profile of all ranks.

        Args:
            original: the original graph, where the trace does not hold it.
            machine: the speed of the devices, for the prediction; None: round figures.

        Raises:
            GraphError: no step ran.
            ClusterError: a rank is missing.
        """
        self._let_go()
        trace = self.tracer.stop(self._marks)
        said: tuple[Any, Any] = None, ()
        if self.ranks.is_chief and self.tracer.traces:
            first = self.tracer.traces[0]
            what = first if original is None else RewrittenTrace(original, first.rewritten)
            said = prediction(what, self.tracer.examples[0] * cut_among(first.rewritten), machine)
        traces, text = self.ranks.gather(trace, json.dumps(said))
        return Profile.of(traces, *json.loads(text))

    def _let_go(self) -> None:
        for one, before in self._observed:
            one.observer = before


# The traces of all ranks of a job: the ranks meet to compare clocks, trace the same steps, and exchange all traces.


ROUNDS = 8
"""How often ranks meet before the steps: the quickest round says most about their clocks."""
WHAT = "profile steps"


class Ranks:
    """All ranks of the job in which some items run; a single process is the only rank."""

    def __init__(self, items: Sequence[TrainingGraph]) -> None:
        reports = [item.report for item in items if item.report is not None and item.report.member is not None]
        self._job: tuple[Membership, float] | None = None
        if reports and len(reports[0].member.workers) > 1:
            self._job = reports[0].member, reports[0].plan.timeout_seconds

    @property
    def is_chief(self) -> bool:
        """Whether this is the first rank."""
        return self._job is None or self._job[0].is_chief

    def meet(self) -> list[tuple[int, int]]:
        """Wait for all ranks; return when exchanges with them began and ended, in nanoseconds.

        Raises:
            ClusterError: a rank is missing.
        """
        return [] if self._job is None else Rendezvous(*self._job).rounds(ROUNDS, WHAT)

    def gather(self, trace: RankTrace, extra: str) -> tuple[list[RankTrace], str]:
        """Return the traces of all ranks, and the `extra` of the first rank.

        Raises:
            ClusterError: a rank is missing.
        """
        if self._job is None:
            return [trace], extra
        mine = zlib.compress(json.dumps([trace.data(), extra]).encode())
        said = [json.loads(zlib.decompress(data)) for data in Rendezvous(*self._job).contents(mine, WHAT)]
        return [RankTrace.of(data) for data, _ in said], said[0][1]


def cut_among(item: TrainingGraph) -> int:
    """Return how many ranks give different examples to a step; with stages all feed the same batch."""
    return 1 if item.report is None or item.report.plan.is_driven else len(item.report.plan.processes)


# The prediction of the measured step, for the same number of examples.


def prediction(
    trace: RewrittenTrace | None, examples: int, machine: Machine | None = None
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the simulated step as plain data, and notes about it.

    Args:
        trace: the graph that ran, and its original.
        examples: of all ranks; 0: as the graph states.
        machine: the speed of its devices; None: round figures.
    """
    if trace is None or trace.rewritten.report is None:
        return None, ()
    if trace.original is trace.rewritten:
        return None, ("the original graph is not at hand, so nothing is predicted",)
    if trace.rewritten.report.plan.steps_per_run > 1:
        return None, ("each run does several steps (steps_per_run): `simulate` predicts one of them",)
    try:
        found = simulate(trace.original, trace.rewritten.report.plan, batch=examples or None, machine=machine).found
    except RewriteError as error:
        return None, (f"the step cannot be simulated: {error}",)
    notes = () if machine is not None else ("the prediction takes round figures for this machine: calibrate it",)
    return of_step(found), notes


# A profile that the environment asks for: the first function or session to run a step is traced.
#
# `autograph-rewrite profile` sets AUTOGRAPH_REWRITE_PROFILE for each process that it starts, and reads their files:
#
#     {"folder": "/tmp/x", "skip": 2, "steps": 5}   ->   /tmp/x/rank_0.json, /tmp/x/rank_1.json


class RequestedProfile:
    """Observes the steps of one function or session; the first to run a step takes the request."""

    def __init__(self, variable: str) -> None:
        self._variable = variable
        self._request: Mapping[str, Any] | None = None
        self._tracer: Tracer | None = None
        self._seen = 0

    @contextmanager
    def step(self, trace: RewrittenTrace, examples: int | None) -> Iterator[None]:
        """Run one step, and trace it if it is one of the requested steps."""
        text = os.environ.pop(self._variable, None) if self._request is None else None
        if text is not None:
            self._request = json.loads(text)
        if self._request is None or self._seen >= self._request["skip"] + self._request["steps"]:
            yield
            return
        if self._seen == self._request["skip"]:
            self._tracer = Tracer()
            self._tracer.start()
            atexit.register(self._write)
        self._seen += 1
        with self._tracer.step(trace, examples) if self._tracer is not None else nullcontext():
            yield
        if self._seen == self._request["skip"] + self._request["steps"]:
            self._write()

    def _write(self) -> None:
        """End the trace, and write it into the requested folder."""
        atexit.unregister(self._write)
        if self._tracer is None or self._request is None or not self._tracer.examples:
            return
        tracer, request, self._tracer = self._tracer, self._request, None
        found = tracer.stop()
        said: dict[str, Any] = {"trace": found.data(), "predicted": None, "notes": []}
        if found.rank == 0:
            machine = calibrate() if request.get("calibrate") else None
            examples = tracer.examples[0] * cut_among(tracer.traces[0].rewritten)
            said["predicted"], said["notes"] = prediction(tracer.traces[0], examples, machine)
        folder = Path(request["folder"])
        write_whole(folder / f"rank_{found.rank}.json", json.dumps(said).encode())


# The trace of this process: TensorFlow's profiler records some steps, which become a `RankTrace`.
#
# A step is one call of a distributed function, or one run of a session: they report it to their observer.

STEP = "autograph_rewrite_step"


@dataclass
class Tracer:
    """A trace of this process.

    Attributes:
        examples: of each step; 0 if unknown.
        traces: the graphs that ran, in order of their first steps.
    """

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="autograph_profile_")))
    examples: list[int] = field(default_factory=list)
    traces: list[RewrittenTrace] = field(default_factory=list)

    def start(self) -> None:
        """Begin the trace.

        Raises:
            GraphError: TensorFlow's profiler is running already.
        """
        tf = tensorflow()
        try:
            tf.profiler.experimental.start(str(self.folder))  # its defaults have every kernel, and no Python
        except tf.errors.AlreadyExistsError as error:
            self.discard()
            hint = "stop tf.profiler, or leave profile_batch out of keras.callbacks.TensorBoard"
            raise GraphError("TensorFlow's profiler is running already", hint=hint) from error

    @contextmanager
    def step(self, trace: RewrittenTrace | None = None, examples: int | None = None) -> Iterator[None]:
        """Run one step, and mark it in the trace."""
        if trace is not None and all(trace.rewritten is not known.rewritten for known in self.traces):
            self.traces.append(trace)
        with tensorflow().profiler.experimental.Trace(STEP, step_num=len(self.examples), _r=1):
            yield
        self.examples.append(examples or 0)

    def stop(self, marks: Sequence[tuple[int, int]] = ()) -> RankTrace:
        """End the trace, and return it.

        Args:
            marks: begin and end of exchanges with other ranks, by this process's clock.

        Raises:
            GraphError: no step ran.
        """
        tensorflow().profiler.experimental.stop()
        try:
            files = sorted(self.folder.rglob("*.xplane.pb"))
            items = [trace.rewritten for trace in self.traces]
            return rank_trace(files[-1].read_bytes() if files else b"", items, self.examples, marks)
        finally:
            self.discard()

    def cancel(self) -> None:
        """End the trace, and discard it."""
        tensorflow().profiler.experimental.stop(save=False)
        self.discard()

    def discard(self) -> None:
        """Remove the files of the profiler."""
        shutil.rmtree(self.folder, ignore_errors=True)


def rank_trace(
    data: bytes, items: Sequence[TrainingGraph], examples: Sequence[int], marks: Sequence[tuple[int, int]] = ()
) -> RankTrace:
    """Return the trace of this rank from an encoded XSpace.

    Args:
        items: the graphs that ran, whose nodes are measured.
        examples: of each step on this rank; 0: unknown.
        marks: begin and end of exchanges with other ranks, by this process's clock.

    Raises:
        GraphError: no step ran.
    """
    kernels, times = read(data, STEP)
    if not times:
        raise GraphError(
            "nothing was profiled: no step ran",
            hint="profile what runs a step: a distributed function, session or model",
        )
    attribution = Attribution(items)
    sources: dict[tuple[str, str, Any], int] = {}
    described: list[RunSource] = []
    ran: list[Ran] = []
    first, last = times[0][0], times[-1][1]
    for kernel in sorted(kernels, key=lambda one: (one.start, one.end)):
        if kernel.end < first or kernel.start > last:
            continue
        number = sources.setdefault((kernel.name, kernel.op, kernel.route), len(described))
        if number == len(described):
            described.append(attribution.source(kernel.name, kernel.op, kernel.route))
        ran.append(Ran(number, kernel.start, kernel.end))
    rank, flops, feeds = _of_rank(items, sum(examples) // max(1, len(examples)))
    steps = tuple(MeasuredStep(*one, count * feeds) for one, count in zip(times, examples, strict=False))
    return RankTrace(rank, clock_of_this_machine(), steps, tuple(described), tuple(ran), tuple(marks), flops)


def _of_rank(items: Sequence[TrainingGraph], examples: int) -> tuple[int, float, bool]:
    """Return this rank, the FLOPs of a step of all ranks, and whether its examples count."""
    for item in items:
        if (report := item.report) is not None:
            covered = report.covered.at(examples * cut_among(item) or None)
            return report.task, covered.flops, not (report.plan.is_driven and report.task)  # of stages, rank 0 counts
    return 0, 0.0, True


def clock_of_this_machine() -> str:
    """Return an identifier of this machine's clock: host name and boot."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


# Kernels in the XSpace of TensorFlow's profiler: which ran, with begin and end.
#
# sync     an event  name:op                                           on the thread that ran it
# async    ExecutorState::ProcessAsync::Start, ...::Done               a collective or receive, paired by their id
# step     an event with the name that whoever asked for it has given


KERNEL = re.compile(r"([^:\s]+):(_?[A-Za-z]\w*)")
_START, _DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"
_NUMBERED = re.compile(r"(.+(?:/_|_S|_G))(\d+)")


class KernelRun(NamedTuple):
    """One run of a node, in nanoseconds since the epoch, by the clock of its process."""

    name: str
    op: str
    start: int
    end: int
    route: tuple[str, str] | None = None


class _Event(NamedTuple):
    name: str
    start: int
    end: int
    stats: Mapping[str, Any]


def read(data: bytes, step: str) -> tuple[list[KernelRun], list[tuple[int, int]]]:
    """Return the kernels of a trace, in no order, and start and end of each step.

    Args:
        step: name of the events that mark steps.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(data)
    begin = _began(space)
    kernels: list[KernelRun] = []
    steps: list[tuple[int, int]] = []
    started: dict[Any, _Event] = {}
    done: dict[Any, _Event] = {}
    for plane in space.planes:
        for event in _events(plane, begin, step):
            if event.name == step:
                steps.append((event.start, event.end))
            elif event.name == _START:
                started[event.stats.get("_p"), event.stats.get("name")] = event
            elif event.name == _DONE:
                done[event.stats.get("_c"), event.stats.get("name")] = event
            else:
                name, op = KERNEL.fullmatch(event.name).groups()  # type: ignore[union-attr]
                if not has(op, "completes_later"):
                    kernels.append(KernelRun(name, op, event.start, event.end, _route(event.stats.get("key"))))
    for key, event in started.items():
        if key in done:
            name, op = str(event.stats["name"]), str(event.stats["kernel_type"])
            kernels.append(KernelRun(name, op, event.start, done[key].start))
    return list(_matched(kernels)), sorted(steps)


def _began(space: Any) -> int:
    """Return the time from which all times of a trace count."""
    for plane in space.planes:
        names = {number: one.name for number, one in plane.stat_metadata.items()}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return 0


def _events(plane: Any, begin: int, step: str) -> Iterator[_Event]:
    """Yield the events of steps, kernels, and asynchronous starts and ends."""
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


def _matched(kernels: list[KernelRun]) -> Iterator[KernelRun]:
    """Yield the kernels; a receive begins when its value is sent, as it only waits before.

    TensorFlow names the receive of `x/_7` `x/_8`, and between processes that of `x_S7` `x_S8`.
    """
    sends: dict[str, list[KernelRun]] = {}
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
