"""What each device of a simulated step holds and computes, and what each node of it costs.

    shared, 2 replicas on CPUs     cpu                  all replicas
    mirrored                       first cpu device     what exists once, too      other cpu devices
    a model axis of 2              CPU:0   CPU:1        the first replica's        CPU:2   CPU:3        the others'

Identical devices stand together, logical ones apart. A node costs time, memory at the peak, and what is exchanged of
what it makes. The seconds of all nodes together are those for which the first device of a process (and its servers) is
busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from autograph_rewrite.analysis.work.liveness import Holders, first_holders
from autograph_rewrite.cost.hardware.topology import CPU, OTHERS, REST, Topology
from autograph_rewrite.cost.pipeline.tasks import StagedStep
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep
from autograph_rewrite.cost.tasks.layers import NodeUse
from autograph_rewrite.cost.tasks.result import DeviceUse
from autograph_rewrite.cost.tasks.task import COMPUTE, Buffer, Task, lives_of
from autograph_rewrite.cost.tasks.task_graph import Built
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.stages.forward_backward import forward_nodes


@dataclass(frozen=True)
class DeviceContent:
    """What one kind of device has.

    Attributes:
        name: for people.
        count: how many there are.
        busy: seconds that one computes.
        buffers: its memory.
        work: FLOPs and bytes that one computes.
    """

    name: str
    count: int
    busy: float
    buffers: list[Buffer]
    work: tuple[float, float] = (0.0, 0.0)


def device_uses(
    folded: AnalyzedStep, plan: Plan, built: Built, topology: Topology, *, lines: bool
) -> list[tuple[DeviceUse, list[Buffer]]]:
    """Return the devices of a step that has been played, each with what is in its memory at the peak.

    Args:
        plan: resolved.
        built: its tasks and buffers.
        topology: of the plan.
        lines: whether memory over time, and what of it is activations, is wanted.
    """
    found = _on_logical_devices(built, topology) if topology.logical > 1 else _on_lanes(folded, built, topology)
    activations = _activations(folded, plan, built) if lines else frozenset()
    return [_use(one, activations, lines=lines) for one in found]


def _busy(built: Built, tasks: Iterable[Task]) -> dict[str, float]:
    """Return for how long tasks keep each place busy: of cores, for how long all of them would be."""
    busy: dict[str, float] = {}
    for task in tasks:
        if task.kind == COMPUTE:
            for lane, held in built.busy(task).items():
                place = task.place or lane
                busy[place] = busy.get(place, 0.0) + held
    return busy


def _on_lanes(folded: AnalyzedStep, built: Built, topology: Topology) -> Iterator[DeviceContent]:
    busy = _busy(built, built.tasks)
    for lane in dict.fromkeys([*topology.lanes, *built.variable_bytes]):
        own = [buffer for buffer in built.buffers if buffer.place == lane]
        count = topology.processes
        if lane == REST:
            count *= topology.local - 1
        elif lane == OTHERS:
            continue  # they stand beside the first one
        elif lane not in topology.lanes:
            count = 1
        if lane == CPU and topology.local > 1:
            each = (task for node, tasks in built.tasks_of.items() if node in folded.each for task in tasks)
            both = busy.get(lane, 0.0), _busy(built, each).get(lane, 0.0)
            yield from _cpu_devices(built, topology, own, both)
        else:
            work = _work(built, lane, 1, once=lane != REST)
            yield DeviceContent(lane, count, busy.get(lane, 0.0), own, work)


def _cpu_devices(
    built: Built, topology: Topology, own: list[Buffer], busy: tuple[float, float]
) -> Iterator[DeviceContent]:
    """Yield the CPU devices of a process: the first also has what exists once, and all replicas of shared variables.

    Args:
        built: the tasks of the step.
        topology: of the plan.
        own: what is in the memory of the CPU.
        busy: seconds of everything, and of what each replica does: all replicas compute on the same cores at a time.
    """
    others = topology.processes * (topology.local - 1)
    apart = built.variable_bytes.get(OTHERS, 0) // (topology.local - 1)
    held = [Buffer(apart, OTHERS, each=False, kept=True)]
    each = [buffer for buffer in own if buffer.each]
    if topology.plan.mode == "shared":
        together = own + each * (topology.local - 1)
        yield DeviceContent(CPU, topology.processes, busy[0], together, _work(built, CPU, topology.local))
        if apart:
            yield DeviceContent(OTHERS, others, 0.0, held)
    else:
        yield DeviceContent("first cpu device", topology.processes, busy[0], own, _work(built, CPU, 1))
        yield DeviceContent(OTHERS, others, busy[1], each + held, _work(built, CPU, 1, once=False))


def _on_logical_devices(built: Built, topology: Topology) -> Iterator[DeviceContent]:
    """Yield the logical devices of the first replica, then those of the others, which only have what each has."""
    busy, lanes = _busy(built, built.tasks), topology.lanes
    for device in range(topology.logical):
        place = topology.place(lanes[0], device)
        own = [buffer for buffer in built.buffers if buffer.place == place]
        name = short(topology.logical_name(device))
        yield DeviceContent(name, topology.processes, busy.get(place, 0.0), own, _work(built, place, 1))
    for device in range(topology.logical if topology.local > 1 else 0):
        place, name = topology.place(lanes[-1], device), short(topology.logical_name(device, 1))
        own = [buffer for buffer in built.buffers if buffer.place == place and buffer.each]
        more = f" and {topology.local - 2} alike" if topology.local > 2 else ""
        count, work = topology.processes * (topology.local - 1), _work(built, place, 1, once=False)
        yield DeviceContent(name + more, count, 0.0 if len(lanes) == 1 else busy.get(place, 0.0), own, work)
    for lane in built.variable_bytes:
        if all(lane != topology.place(own, device) for own in lanes for device in range(topology.logical)):
            own = [buffer for buffer in built.buffers if buffer.place == lane]
            yield DeviceContent(lane, 1, busy.get(lane, 0.0), own)


def _work(built: Built, place: str, instances: int, *, once: bool = True) -> tuple[float, float]:
    """Return FLOPs and bytes of a device: of what runs once, and of so many instances of what each replica runs."""
    alone, each = (built.work.get((place, kind), (0.0, 0.0)) for kind in (False, True))
    return (alone[0] * once + each[0] * instances, alone[1] * once + each[1] * instances)


def _activations(folded: AnalyzedStep, plan: Plan, built: Built) -> frozenset[Buffer]:
    """Return what the forward pass makes and the backward pass reads."""
    try:
        forward = forward_nodes(plan, folded.state, folded.outputs)
    except PlanError:  # nothing is trained
        return frozenset()
    tasks = {task for node in forward for task in built.tasks_of.get(node, ())}
    made = (one for one in built.buffers if one.maker in tasks and not one.kept)
    return frozenset(one for one in made if any(reader not in tasks for reader in one.readers))


def _use(held: DeviceContent, activations: Collection[Buffer], *, lines: bool) -> tuple[DeviceUse, list[Buffer]]:
    buffers = held.buffers
    variables = [buffer for buffer in buffers if buffer.kept and buffer.maker is None]
    flops, nbytes = held.work
    lives = lives_of(buffers)
    alive = (one for one in buffers if one.passes and one.born <= lives.top < one.freed)
    top = [*(one for one in buffers if one.kept), *alive] if lines else []
    use = DeviceUse(
        held.name,
        held.count,
        held.busy,
        lives.peak,
        sum(buffer.nbytes for buffer in variables),
        activation_bytes=sum(buffer.nbytes for buffer in top if buffer in activations),
        slot_bytes=sum(buffer.nbytes for buffer in variables if buffer.is_slot),
        flops=flops,
        accessed_bytes=nbytes,
        memory=lives.over_time() if lines else (),
        holders=_holders(top),
    )
    return use, top


def _holders(alive: Iterable[Buffer]) -> Holders:
    """Return who holds the most of what is alive: the makers of buffers, and what is always there, together."""
    held = Counter[str]()
    for buffer in alive:
        if not buffer.kept and buffer.maker is not None:
            held[buffer.maker.name] += buffer.nbytes
        else:
            held["variables" if buffer.maker is None else "inputs, constants and outputs"] += buffer.nbytes
    return first_holders(held)


@dataclass
class _Sums:
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchanged_bytes: int = 0
    peak_bytes: int = 0


@dataclass
class _ByNode:
    found: dict[str, _Sums] = field(default_factory=dict)

    def of(self, name: str) -> _Sums:
        return self.found.setdefault(name, _Sums())

    def result(self) -> tuple[NodeUse, ...]:
        return tuple(NodeUse(name, **vars(one)) for name, one in self.found.items() if any(vars(one).values()))


def node_uses(folded: AnalyzedStep, built: Built, alive: Iterable[Buffer]) -> tuple[NodeUse, ...]:
    """Return the cost of each node of a step that has been played; the exchange of a gradient is its variable's.

    Args:
        built: its tasks.
        alive: what is in the memory of the fullest device at the peak.
    """
    sums, node_of, variables = _ByNode(), dict[Task, str](), folded.item.variables
    for node, tasks in built.tasks_of.items():
        node_of.update(dict.fromkeys(tasks, node.name))
    for group, tasks in built.groups:
        node_of.update(dict.fromkeys(tasks, group.members[0].value.node.name))
        for member in group.members:
            owner = member.edge.owner
            own = sums.of(variables[owner].handle if owner in variables else member.value.node.name)
            own.exchanged_bytes += member.sent
            own.exchange_seconds += sum(map(_exchanging, tasks)) * member.sent / max(1, group.sent)
    for task in built.tasks:
        if task.kind == COMPUTE:
            held = (seconds for lane, seconds in built.busy(task).items() if not lane.startswith(REST))
            sums.of(node_of.get(task, task.name)).seconds += sum(held)
    for buffer in alive:
        maker = node_of.get(buffer.maker, buffer.maker.name) if buffer.maker is not None else buffer.handle
        sums.of(maker).peak_bytes += buffer.nbytes
    return sums.result()


def _exchanging(task: Task) -> float:
    return 0.0 if task.kind == COMPUTE else task.seconds


def staged_uses(step: StagedStep) -> tuple[NodeUse, ...]:
    """Return the seconds of each node of a pipelined step, over all stages of one replica; memory is that of parts."""
    sums = _ByNode()
    for part, nodes in step.staged.parts.items():
        for node, seconds in step.seconds_of(part, nodes):
            sums.of(node.name).seconds += seconds
    return sums.result()
