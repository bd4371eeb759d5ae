"""Make and simulate the tasks of a pipelined step: the parts of all micro-batches, in the order of the schedule.

    device 0   F0 F1 .. B0 F2 B1 ..  update          each part waits for the one before it on its device,
                 └─► h ─┐    ▲                       and for values from other devices
    device 1        F0 B0 F1 B1 ..   update

A part takes as long as its nodes one after another; a value that is sent takes its bytes over the link's bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from autograph_rewrite.analysis.liveness import Holders, Lives, first_holders
from autograph_rewrite.cost.hardware.machine import Link
from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.pipeline.liveness import Footprint, LiveTensor, footprint
from autograph_rewrite.cost.pipeline.parts import AFTER, BEFORE, Part, Staged
from autograph_rewrite.cost.tasks.result import DeviceUse, ExchangeUse
from autograph_rewrite.cost.tasks.step import OpCounts
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Task, compute_seconds, on_cores, simulate_events
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.device_names import parse, process_of, short
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.plan.parts import pipeline_schedule
from autograph_rewrite.plan.parts.messages import STEP, Pipeline
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD
from autograph_rewrite.plan.parts.residence import Residence, Sharded
from autograph_rewrite.plan.plan import Plan

Key = tuple[str, int, int, int]
"""A task: kind of part, micro-batch, stage, replica; for BEFORE and AFTER, the device's number instead of a stage."""


class Alive(NamedTuple):
    """Memory on a device, from the start of a task to the end of its last reader.

    Attributes:
        nbytes: how much; negative if a part frees memory before its end that `held` entries count until its end.
        maker: the task that makes it.
        readers: the other tasks that read it.
        held: the tensor between parts, if it is one.
        waiting: it was received from another device; it counts until its first reader starts.
    """

    nbytes: int
    device: str
    maker: Task
    readers: tuple[Task, ...] = ()
    held: LiveTensor | None = None
    waiting: bool = False

    @property
    def end(self) -> float:
        """When it is freed."""
        if self.waiting:
            return min(reader.start for reader in self.readers)
        return max([self.maker.end, *(reader.end for reader in self.readers)])


@dataclass(repr=False)
class StagedStep:
    """Builds the tasks of a step in stages, and the memory between them; `run` plays them.

    Attributes:
        footprint: the memory of a micro-batch.
        mirrored: each replica has a copy of the variables, and all replicas of a stage add up the gradients.
        tasks: the tasks that compute.
        moves: the tasks that send, by the task whose outputs they send and the target device.
        meetings: the tasks in which the replicas of a stage add up gradients, by its device.
        alive: memory, by device and time.
    """

    staged: Staged
    footprint: Footprint
    pipeline: Pipeline
    micro: int
    topology: Topology
    mirrored: bool = False
    tasks: dict[Key, Task] = field(default_factory=dict)
    moves: dict[tuple[Key, str], Task] = field(default_factory=dict)
    meetings: dict[int, Task] = field(default_factory=dict)
    alive: list[Alive] = field(default_factory=list)
    _took: dict[tuple[Part, str], tuple[float, int]] = field(default_factory=dict)
    _needed: dict[tuple[Part, bool], int] = field(default_factory=dict)

    @property
    def devices(self) -> list[tuple[str, ...]]:
        """The devices of each replica's stages."""
        each, names = len(self.staged.devices), self.pipeline.devices
        return [names[first : first + each] for first in range(0, len(names), each)]

    @property
    def all_tasks(self) -> list[Task]:
        """All tasks that compute, send and add up gradients."""
        return [*self.tasks.values(), *self.moves.values(), *self.meetings.values()]

    def run(self) -> float:
        """Make all tasks and play them; return how long they take.

        Raises:
            PlanError: the schedule does not exist for this number of micro-batches, or it deadlocks.
        """
        orders = pipeline_schedule.orders(*schedule_of(self.pipeline, self.staged, self.micro))
        for replica in range(len(self.devices)):
            for device, order in enumerate(orders):
                before = self._once(BEFORE, device, replica)
                made = [self._part(task, replica) for task in order if (task.kind, task.stage) in self.staged.parts]
                after = self._once(AFTER, device, replica)
                for first, then in pairwise([before, *made, after]):
                    then.needs.append(first)
        for replica in range(len(self.devices)):
            self._connect(replica)
        lanes = {lane for task in self.tasks.values() for lane in task.holds if lane.endswith("cpu")}
        seconds = simulate_events(self.all_tasks, dict.fromkeys(lanes, self.topology.machine.cores))
        stuck = [task.name for task in self.tasks.values() if task.seconds and not task.end]
        if stuck:
            raise PlanError(
                f"the schedule waits for itself: {', '.join(stuck[:4])} never begin",
                hint="stages must follow each other; see boundaries",
            )
        return seconds

    # What runs.

    def _part(self, one: pipeline_schedule.Task, replica: int) -> Task:
        device = self._at((one.kind, one.stage), replica)
        more = f" of replica {replica}" if replica else ""
        task = _computing(f"{one}{more}", one.kind, device, *self._seconds((one.kind, one.stage), parse(device).kind))
        self.tasks[one.kind, one.micro, one.stage, replica] = task
        return task

    def _once(self, kind: str, device: int, replica: int) -> Task:
        """Make the task of the nodes that run once on a device; it is empty on replicas without variables."""
        own = [
            self.staged.counts[node]
            for part, nodes in self.staged.parts.items()
            if part[0] == kind and self.staged.device(part) == device and self._home(replica) == replica
            for node in self._timed_nodes(nodes)
        ]
        at = self.devices[replica][device]
        name = f"{'reads' if kind == BEFORE else 'update'} on {short(at)}"
        task = _computing(name, kind, at, *self._work(own, parse(at).kind, 1))
        self.tasks[kind, 0, device, replica] = task
        return task

    def _home(self, replica: int) -> int:
        """Return the replica that holds the variables of a replica."""
        return replica if self.mirrored else 0

    def seconds_of(self, part: Part, nodes: Iterable[Node]) -> Iterator[tuple[Node, float]]:
        """Yield the seconds of each node in a step, for all micro-batches; on a CPU, as if it kept all cores busy."""
        on_cpu = parse(self._at(part, 0)).kind == "CPU"
        machine = self.topology.machine
        for node in self._timed_nodes(nodes):
            one = self.staged.counts[node]
            if on_cpu:
                took, width = on_cores(one.work, 1, machine, one.runs)
                yield node, took * width / machine.cores
            else:
                yield node, (compute_seconds(one.work, machine.accelerator) + machine.accelerator.op_seconds) * one.runs

    def _timed_nodes(self, nodes: Iterable[Node]) -> Iterable[Node]:
        """Return the nodes that determine a part's time: on logical accelerators those of the first, which has most."""
        return nodes if self.topology.on_cpu else [node for node in nodes if not self.staged.folded.logical.get(node)]

    def _seconds(self, part: Part, kind: str) -> tuple[float, int]:
        """Return how long a part takes on a kind of device, and how many cores it keeps busy."""
        if (part, kind) not in self._took:
            nodes = [self.staged.counts[node] for node in self._timed_nodes(self.staged.parts[part])]
            self._took[part, kind] = self._work(nodes, kind, self.micro)
        return self._took[part, kind]

    def _work(self, nodes: Iterable[OpCounts], kind: str, micro: int) -> tuple[float, int]:
        """Return how long nodes take one after another for one micro-batch, and how many cores they keep busy."""
        if kind != "CPU":
            each = self.topology.machine.accelerator
            return sum((compute_seconds(one.work, each) + each.op_seconds) * one.runs / micro for one in nodes), 1
        seconds = together = 0.0
        for one in nodes:
            took, width = on_cores(one.work, 1, self.topology.machine, one.runs)
            seconds += took / micro
            together += took / micro * width
        return seconds, max(1, round(together / seconds)) if seconds else 1

    # Transfers between devices, and memory.

    def _connect(self, replica: int) -> None:
        """Make tasks wait for the values that they read, and record the memory between them."""
        for (part, device), nbytes in self.footprint.crossing.items():
            for micro in range(self.micro if part[0] in (FORWARD, BACKWARD) else 1):
                self._send(self._key(part, micro, replica), self.devices[replica][device], nbytes)
        for held, nbytes in self.footprint.held.items():
            if held.is_sum:
                self._sum(held, nbytes, replica)
            elif held.maker[0] in (FORWARD, BACKWARD):
                for micro in range(self.micro):
                    self._hold(held, nbytes, micro, replica)
        for kind, micro, number, own in list(self.tasks):
            if own == replica and kind in (FORWARD, BACKWARD):
                task = self.tasks[kind, micro, number, own]
                self.alive.append(Alive(self._inside((kind, number), micro), self._at((kind, number), replica), task))
        for device, name in enumerate(self.devices[replica] if self._home(replica) == replica else ()):
            updates = [part for part in self.staged.parts if part[0] == AFTER and self.staged.device(part) == device]
            inside = max([self._inside(part, 0) for part in updates], default=0)
            self.alive.append(Alive(inside, name, self.tasks[AFTER, 0, device, replica]))

    def _inside(self, part: Part, micro: int) -> int:
        """Return the peak inside a part, minus the tensors between parts that are counted during the whole part."""
        key = part, micro > 0
        if key not in self._needed:
            between = sum(
                nbytes
                for held, nbytes in self.footprint.held.items()
                if held.device == self.staged.device(part)
                and (part == held.maker or (part in held.readers and not held.is_sum))
                and (not held.is_sum or not micro)
            )
            self._needed[key] = (self.footprint.later if micro else self.footprint.first)[part] - between
        return self._needed[key]

    def runs_on(self, key: Key) -> int:
        """Return the number of the device that runs a task."""
        return self.staged.device((key[0], key[2])) if key[0] in (FORWARD, BACKWARD) else key[2]

    @property
    def places(self) -> dict[int, str]:
        """The device of each task that computes, by `id(task)`; on CPUs, several devices share one lane."""
        return {id(task): short(self.devices[key[3]][self.runs_on(key)]) for key, task in self.tasks.items()}

    def _at(self, part: Part, replica: int) -> str:
        return self.devices[replica][self.staged.device(part)]

    def _key(self, part: Part, micro: int, replica: int) -> Key:
        once = part[0] in (BEFORE, AFTER)
        if once:
            return part[0], 0, self.staged.device(part), self._home(replica)
        return part[0], micro, part[1], replica

    def _send(self, key: Key, target: str, nbytes: int) -> Task:
        """Add bytes to the task that sends a task's outputs to another device."""
        kind, _, number, replica = key
        source = self._at((kind, number), replica)
        if (key, target) not in self.moves:
            task = self.moves[key, target] = Task(f"send {self.tasks[key].name}", EXCHANGE, "send", {}, 0.0)
            task.after([self.tasks[key]])
            for (other, _, stage, own), reader in self.tasks.items() if kind == BEFORE else ():
                if other == FORWARD and self._at((other, stage), own) == target:
                    reader.after([task])  # outputs of BEFORE are mostly variables, which all forward parts need
        link, lane = self._link(source, target), f"{short(source)} to {short(target)}"
        return _carrying(self.moves[key, target], lane, nbytes, link)

    def _link(self, source: str, target: str) -> Link | None:
        """Return the link between two devices; None if they share memory."""
        if process_of(source) != process_of(target):
            return self.topology.network
        if parse(source).kind == parse(target).kind == "CPU":
            return None
        return self.topology.machine.local

    def _hold(self, held: LiveTensor, nbytes: int, micro: int, replica: int) -> None:
        """Record a tensor of one micro-batch, and make its readers wait for it."""
        key, device = self._key(held.maker, micro, replica), self.devices[replica][held.device]
        parts = sorted(held.readers, key=self.staged.rank)
        readers = tuple(self.tasks[self._key(part, micro, replica)] for part in parts)
        if self.staged.device(held.maker) == held.device:
            sends = [self.moves[key, self.devices[replica][to]] for to in held.sent_to]
            for reader in readers:
                reader.after([self.tasks[key]])
            self.alive.append(Alive(nbytes, device, self.tasks[key], (*readers, *sends), held))
            return
        came = self.moves[key, device]
        for reader in readers:
            reader.after([came])
        self.alive.append(Alive(nbytes, device, came, readers[:1], waiting=True))
        self.alive.append(Alive(nbytes, device, readers[0], readers, held))

    def _sum(self, held: LiveTensor, nbytes: int, replica: int) -> None:
        """Record the memory of a gradient that is summed, and make the update wait for it."""
        first, last = (self._key(held.maker, micro, replica) for micro in (0, self.micro - 1))
        update = self.tasks[AFTER, 0, held.device, self._home(replica)]
        device, home = self.devices[replica][held.device], self.devices[self._home(replica)][held.device]
        reader = self.tasks[last]
        if self.mirrored and len(self.devices) > 1:
            self._meet(held.device, nbytes if not replica else 0).after([reader])
            update.after([self.meetings[held.device]])
        if home != device:
            reader = self._send(last, home, nbytes)
            self.alive.append(Alive(nbytes, home, reader, (update,)))
        update.after([reader])
        self.alive.append(Alive(nbytes, device, self.tasks[first], (reader if home != device else update,), held))

    def _meet(self, device: int, nbytes: int) -> Task:
        """Add a gradient to the ring all-reduce of a stage's replicas, which sends 2 (N - 1) / N of its bytes."""
        count, names = len(self.devices), [own[device] for own in self.devices]
        lane = f"replicas of {short(names[0])}"
        task = self.meetings.setdefault(device, Task(f"all-reduce, {lane}", EXCHANGE, "all_reduce", {}, 0.0))
        return _carrying(task, lane, 2 * (count - 1) * nbytes // count, self._link(names[0], names[1]))


def _carrying(task: Task, lane: str, nbytes: int, link: Link | None) -> Task:
    """Add bytes that a task sends over a link; return the task."""
    total = int(task.traffic.get(lane, 0)) + nbytes
    task.seconds = link.time(total) if link is not None else 0.0
    task.traffic, task.holds = {lane: total}, {lane: task.seconds}
    return task


def _computing(name: str, op: str, device: str, seconds: float, width: int) -> Task:
    return Task(name, COMPUTE, op, {_lane(device): seconds}, seconds, width)


def schedule_of(pipeline: Pipeline, staged: Staged, micro: int) -> tuple[str, int, int, int]:
    """Return the schedule's name, and its numbers of devices, micro-batches and stages per device."""
    name = "1f1b" if pipeline.schedule == "one_f_one_b" else pipeline.schedule
    return name, len(staged.devices), micro, staged.stages // len(staged.devices)


def lives_of(alive: Iterable[Alive], kept: int = 0) -> Lives:
    """Return when the memory of one device is allocated and freed.

    Args:
        alive: memory between tasks that have been played.
        kept: bytes that are always allocated.
    """
    rows = ((one.maker.start, one.end, one.nbytes) for one in alive)
    return Lives.of(((start, end, nbytes) for start, end, nbytes in rows if nbytes and end > start), kept)


def _lane(device: str) -> str:
    """Return the lane on which a device computes; the CPU devices of a process share its cores."""
    if parse(device).kind != "CPU":
        return short(device)
    own = process_of(device).replace("/replica:0", "").removeprefix("/")
    return f"{own} cpu".lstrip()


# The results of a pipelined step: its bubble, and the peak memory of each device.


def devices_of(
    step: StagedStep, plan: Plan, topology: Topology, sizes: Sizes, residences: Mapping[str, Residence]
) -> tuple[DeviceUse, ...]:
    """Return the devices of a step that has been played, with their memory.

    Args:
        plan: resolved, of whole variables.
        residences: where variables live, by name; all others live as in the plan.
    """
    if topology.logical > 1:
        return _on_logical_devices(step.staged, plan, topology, sizes, residences)
    return tuple(_devices(step, residences))


def played(staged: Staged, plan: Plan, topology: Topology, sizes: Sizes) -> tuple[StagedStep, float]:
    """Return a step that has been played, and how long it takes.

    Raises:
        PlanError: the schedule is impossible.
    """
    assert plan.pipeline is not None
    held = footprint(staged, sizes, interleaved=plan.interleaved)
    step = StagedStep(staged, held, plan.pipeline, plan.microbatches, topology, plan.mode == "mirrored")
    return step, step.run()


def _on_logical_devices(
    staged: Staged, plan: Plan, topology: Topology, sizes: Sizes, residences: Mapping[str, Residence]
) -> tuple[DeviceUse, ...]:
    """Return the logical devices of all stages, replaying the step once for the memory of each."""
    assert plan.pipeline is not None
    found: list[tuple[int, DeviceUse]] = []
    firsts = {short(name): at for at, name in enumerate(plan.pipeline.devices)}
    for device in range(topology.logical):
        step, _ = played(replace(staged, logical=device), plan, topology, sizes)
        for use in _devices(step, residences):
            number = firsts[use.name] * topology.logical + device
            found.append((number, replace(use, name=short(topology.logical_name(number)))))
    return tuple(use for _, use in sorted(found, key=lambda pair: pair[0]))


def bubble_of(step: StagedStep) -> float:
    """Return the share of the time, from the first forward to the last backward part, in which devices wait."""
    parts = [task for (kind, *_), task in step.tasks.items() if kind in (FORWARD, BACKWARD)]
    span = max(task.end for task in parts) - min(task.start for task in parts)
    devices = sum(map(len, step.devices))
    return 1 - sum(task.seconds for task in parts) / (span * devices) if span else 0.0


def _devices(step: StagedStep, residences: Mapping[str, Residence]) -> Iterator[DeviceUse]:
    """Yield each device of each replica."""
    orders = pipeline_schedule.orders(*schedule_of(step.pipeline, step.staged, step.micro))
    variables, gathered = _variables(step, residences)
    for replica, names in enumerate(step.devices):
        for device in dict.fromkeys(step.staged.devices):
            name = names[device]
            alive = [one for one in step.alive if one.device == name]
            kept = variables.get(device, 0) if step.mirrored or not replica else 0
            fed = step.footprint.fed.get(device, 0) + gathered.get(device, 0)
            slots = [slot for slot, number in enumerate(step.staged.devices) if number == device]
            lives = lives_of(alive, kept + fed)
            forward = [one for one in alive if one.held and one.held.activation_of is not None]
            own = [task for key, task in step.tasks.items() if key[3] == replica and step.runs_on(key) == device]
            yield DeviceUse(
                short(name),
                1,
                sum(task.seconds for task in own),
                lives.peak,
                kept,
                activation_bytes=lives_of(forward).peak,
                gradient_bytes=step.footprint.sums(device),
                memory=lives.over_time(),
                holders=_at_peak(alive, lives.top, kept, fed),
                in_flight=sum(pipeline_schedule.in_flight(orders[slot]) for slot in slots),
            )


def _at_peak(alive: list[Alive], top: float, kept: int, fed: int) -> Holders:
    """Return the largest holders of memory at the peak: variables, feeds, and tasks with the bytes that they made."""
    held = Counter({"variables": kept, "inputs, constants and outputs": fed})
    for one in alive:
        if one.maker.start <= top < one.end:
            held[one.maker.name] += one.nbytes
    return first_holders(held)


def _variables(step: StagedStep, residences: Mapping[str, Residence]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes of variables by device, and of the whole variables that are gathered from replicas' shards."""
    folded, found, gathered = step.staged.folded, dict[int, int](), dict[int, int]()
    owners = {name: use.owner for name, use in folded.uses.items() if use.owner is not None and use.owner != name}
    wholes = {block: whole for whole, blocks in folded.blocks.items() for block in blocks}  # on the model axis
    for name, variable in folded.item.variables.items():
        handle = folded.state.graph.nodes.get(variable.handle)
        if handle is not None and not step.staged.counts_here(handle):
            continue
        part = step.staged.part_of.get(handle) if handle is not None else None
        device = step.staged.device(part) if part is not None else 0
        owner, is_slot, nbytes = owners.get(name, name), name in owners, variable.nbytes
        cut = residences.get(wholes.get(owner, owner))
        if isinstance(cut, Sharded) and cut.stage and not cut.keeps_whole(is_slot=is_slot):
            nbytes = -(-nbytes // len(cut.sizes))
            gathered[device] = gathered.get(device, 0) + (0 if is_slot else variable.nbytes)
        found[device] = found.get(device, 0) + nbytes
    return found, gathered


def exchanges_of(step: StagedStep) -> Iterator[ExchangeUse]:
    """Yield the bytes sent from each part to each device in a step, and the all-reduces of stages."""
    names = step.devices[0]
    for ((kind, number), device), nbytes in sorted(step.footprint.crossing.items()):
        times = step.micro if kind in (FORWARD, BACKWARD) else 1
        value = f"{kind}@{number} to {short(names[device])}"
        yield ExchangeUse(value, "send", (STEP,), nbytes * times)
    for task in step.meetings.values():
        yield ExchangeUse(task.name, "all_reduce", (STEP,), int(sum(task.traffic.values())))
