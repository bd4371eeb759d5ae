"""Define tasks, the units of a simulated step with durations, lanes and buffers, and simulate them.

One task stands for all instances of a node on one lane. A lane of a CPU takes as many tasks at a time as the CPU has
cores; all other lanes take one. Tasks are played by discrete-event simulation: a task starts when its inputs are there
and its lanes are free. Lanes take tasks in the order in which they become ready, like TensorFlow's executor and its
channels.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autograph_rewrite.analysis.liveness import Lives
from autograph_rewrite.analysis.op_work import Work
from autograph_rewrite.cost.hardware.machine import SERIAL, Compute, Machine

COMPUTE, EXCHANGE = "compute", "exchange"
GRAIN_SECONDS = 20e-6
"""Work shorter than this is not divided among cores."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory that a task makes and others read.

    Attributes:
        nbytes: of one instance.
        place: the lane whose device holds it.
        each: whether every replica has an instance.
        maker: the task that makes it.
        readers: the tasks that read it.
        kept: it outlives the step (variables, constants, feeds, fetches).
        is_scratch: it exists only while its maker runs.
        is_slot: it is a slot of an optimizer.
        handle: the handle node of the variable that it holds; empty if it holds none.
    """

    nbytes: int
    place: str
    each: bool
    maker: Task | None = None
    readers: list[Task] = field(default_factory=list)
    kept: bool = False
    is_scratch: bool = False
    is_slot: bool = False
    handle: str = ""

    @property
    def passes(self) -> bool:
        """Whether it is allocated and freed within the step."""
        return not self.kept and self.maker is not None and self.nbytes > 0

    @property
    def born(self) -> float:
        """When it is allocated: TensorFlow allocates outputs as soon as the inputs are there."""
        if self.maker is None:
            return 0.0
        return self.maker.start if self.is_scratch else self.maker.ready

    @property
    def freed(self) -> float:
        """When it is freed; earlier if its last reader writes its result into this buffer.

        The reader can do so if no other reader is running when its result is allocated.
        """
        last: Task | None = max(self.readers, key=lambda task: task.end, default=None)
        if last is None:
            return self.maker.end if self.maker is not None else 0.0
        is_alone = all(task is last or task.end <= last.ready for task in self.readers)
        return last.ready if last.reuses and is_alone else last.end


@dataclass(eq=False, slots=True)
class Task:
    """A unit of work on some lanes.

    Attributes:
        name: of the node or exchange.
        kind: "compute" or "exchange".
        op: the op type, or the lowering.
        holds: seconds for which it occupies each lane.
        width: how many cores it takes on a CPU.
        seconds: from start to end.
        needs: the tasks that end before it starts.
        reuses: its output may reuse the memory of an input of the same size.
        traffic: bytes over one link of each kind.
        place: the device that computes it, if that is not its lane.
        ready: when all of `needs` have ended; `simulate_events` sets it, as it does start and end.
    """

    name: str
    kind: str
    op: str
    holds: Mapping[str, float]
    seconds: float
    width: int = 1
    needs: list[Task] = field(default_factory=list)
    reuses: bool = False
    traffic: Mapping[str, float] = field(default_factory=dict)
    place: str = ""
    index: int = 0
    ready: float = 0.0
    start: float = 0.0
    end: float = 0.0

    def once_in(self, steps: int) -> Task:
        """Return the task with its cost averaged over steps of which only one runs it; call before it is linked."""
        if steps == 1:
            return self
        holds, traffic = ({key: one / steps for key, one in found.items()} for found in (self.holds, self.traffic))
        return replace(self, holds=holds, traffic=traffic, seconds=self.seconds / steps)

    def after(self, tasks: Iterable[Task | None]) -> None:
        """Make it wait for other tasks."""
        self.needs += [task for task in tasks if task is not None]


def lives_of(buffers: Iterable[Buffer]) -> Lives:
    """Return when the buffers of one device are allocated and freed; their tasks have been played."""
    found = list(buffers)
    rows = ((one.born, one.freed, one.nbytes) for one in found if one.passes)
    return Lives.of(rows, sum(one.nbytes for one in found if one.kept))


def compute_seconds(work: Work, compute: Compute) -> float:
    """Return the seconds of one instance of an op, without those of starting it."""
    rate = compute.flops.get(work.family, compute.flops["elementwise"])
    return max(work.flops / rate, work.nbytes / compute.bytes_per_second)


def on_cores(work: Work, instances: int, machine: Machine, runs: int = 1) -> tuple[float, int]:
    """Return the seconds of parallel instances of an op on the cores of one CPU, and how many cores they occupy.

    Args:
        work: of one instance.
        instances: how many run in parallel.
        runs: how often all instances run.
    """
    core = machine.core
    alone = compute_seconds(work, core)
    each = 1 if work.family in SERIAL else max(1, min(machine.cores, int(alone / GRAIN_SECONDS)))
    width = min(machine.cores, each * instances)
    rounds = -(-instances // width)
    seconds = core.op_seconds * rounds + alone * instances / width
    return seconds * runs, width


def simulate_events(tasks: Sequence[Task], cores: Mapping[str, int]) -> float:
    """Set ready, start and end of every task; return when the last one ends.

    Args:
        tasks: in an order in which they could run, which decides between tasks that become ready together.
        cores: how many tasks a lane takes at a time, for lanes that take several.
    """
    free: dict[str, list[float]] = {lane: [0.0] * count for lane, count in cores.items()}
    waiting = [0] * len(tasks)
    users: list[list[int]] = [[] for _ in tasks]
    ready_at = [0.0] * len(tasks)
    for index, task in enumerate(tasks):
        task.index = index
    for index, task in enumerate(tasks):
        for needed in set(task.needs):
            users[needed.index].append(index)
            waiting[index] += 1
    ready = [(0.0, index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    last = 0.0
    while ready:
        at, index = heapq.heappop(ready)
        task = tasks[index]
        task.ready = at
        task.start, task.end = _run(task, at, free)
        last = max(last, task.end)
        for user in users[index]:
            ready_at[user] = max(ready_at[user], task.end)
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (ready_at[user], user))
    return last


def _run(task: Task, at: float, free: dict[str, list[float]]) -> tuple[float, float]:
    """Occupy the task's lanes as soon as all of them are free; return its start and end.

    A task of several cores runs longer on fewer cores if it ends sooner that way.
    """
    held = [(free.setdefault(lane, [0.0]), seconds) for lane, seconds in task.holds.items() if seconds]
    most = max([min(task.width, len(slots)) for slots, _ in held], default=1)
    ends = []
    for width in range(1, most + 1):
        start = max([at, *(slots[min(width, len(slots)) - 1] for slots, _ in held)])
        ends.append((start + task.seconds * most / width, width, start))
    end, width, start = min(ends)
    for slots, seconds in held:
        taken = min(width, len(slots))
        slots[:taken] = [start + seconds * most / width] * taken
        slots.sort()
    return start, end
