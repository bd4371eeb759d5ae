"""`simulate`: predict one step of a distributed graph, without rewriting it and without TensorFlow.

item, plan, cluster ──► folded step ──► tasks ──► played event by event ──► step time, memory, links, trace

Identical devices and processes are simulated as one, so that a thousand take no longer than two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autograph_rewrite.analysis.liveness import Holders, first_holders
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.config.sections import Cluster, Network
from autograph_rewrite.cost.hardware.machine import Machine, network_link
from autograph_rewrite.cost.hardware.topology import CPU, FIRST, IN, LOCAL, OTHERS, OUT, REST, Topology, added
from autograph_rewrite.cost.pipeline.parts import Staged, divided
from autograph_rewrite.cost.pipeline.tasks import StagedStep, bubble_of, devices_of, exchanges_of, played
from autograph_rewrite.cost.tasks.communication import ExchangeGroup
from autograph_rewrite.cost.tasks.layers import NodeUse
from autograph_rewrite.cost.tasks.result import DeviceUse, Event, ExchangeUse, LinkUse, Simulation
from autograph_rewrite.cost.tasks.step import AnalyzedStep, OpCounts, count, fold, neutral
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Buffer, Task, lives_of, simulate_events
from autograph_rewrite.cost.tasks.task_graph import LINK, Built, build
from autograph_rewrite.diagnostics.faults import raise_if_any
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES, Sizes
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.pass_pipeline import add_alternatives
from autograph_rewrite.plan.parts.messages import MODEL_AXIS
from autograph_rewrite.plan.parts.names import exchanged_bytes
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import VARIABLE_CHECKS, require
from autograph_rewrite.resolve.stages.assignment import forward_nodes
from autograph_rewrite.resolve.wire_types import sizes_of
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Hardware:
    """The devices and network that a step runs on.

    Attributes:
        machine: how fast its devices are.
        network: between processes, as the configuration describes it.
    """

    machine: Machine = field(default_factory=Machine)
    network: Network | None = None

    def topology(self, plan: Plan) -> Topology:
        """Return the devices and links of a plan."""
        return Topology(plan, self.machine, network_link(self.network))


@dataclass(frozen=True)
class SimulatedStep:
    """A predicted step, with the analysis that predictions of other plans can reuse.

    Attributes:
        batch: examples of the global batch; None if the caller gave none.
    """

    plan: Plan
    folded: AnalyzedStep
    counts: Mapping[Node, OpCounts]
    hardware: Hardware
    batch: int | None
    found: Simulation


def simulate(
    item: TrainingGraph,
    plan: Plan,
    cluster: ConfigLike | Cluster | Network | None = None,
    *,
    batch: int | None = None,
    machine: Machine | None = None,
) -> SimulatedStep:
    """Predict one step.

    Args:
        item: a training graph; it is not changed.
        plan: a request or a resolved plan for it.
        cluster: the speed of the network, as a configuration or its `cluster` or `network` section.
        batch: examples of all replicas together; default: the size in the graph, else 32 for each replica.
        machine: the speed of the devices; default: round figures. `calibrate()` measures this machine.

    Raises:
        GraphError: the graph has no batch input, or it has been distributed already.
        PlanError: the plan does not fit this graph.
    """
    if item.report is not None:
        raise GraphError("this item is distributed already", hint="simulate the original one, with new.report.plan")
    flat = normalise_original(item)
    stage("simulating a step")
    require(replace(neutral(plan), edges=()), flat)
    if plan.model is not None and plan.mode == "mirrored":
        plan = replace(plan, edges=())  # they belong to the program of one device, but each device is priced separately
    wrong = [plan.source.fault(*finding) for one in VARIABLE_CHECKS for finding in one(plan, flat)]
    raise_if_any(wrong, error=PlanError, title=plan.source.name)

    def predicted(plan: Plan) -> SimulatedStep:
        hardware, folded = Hardware(machine or Machine(), network_of(cluster)), fold(flat, plan, batch)
        counts = counted(folded, plan, hardware, batch)
        found = simulated(folded, plan, hardware, batch=batch, counts=counts)
        if plan.has_shards_of_replicas:  # `folded` has no shards, so only the resolved plan has their gathers
            edges = plan.edges or pass_pipeline.resolve(flat, plan, batch).edges
            found = replace(found, exchanged_bytes=exchanged_bytes(edges))
        return SimulatedStep(plan, folded, counts, hardware, batch, found)

    try:
        return predicted(plan)
    except PlanError as error:
        add_alternatives(error, plan, predicted)
        raise


def counted(folded: AnalyzedStep, plan: Plan, hardware: Hardware, batch: int | None) -> Mapping[Node, OpCounts]:
    """Return FLOPs and bytes by node, which do not depend on the homes of variables."""
    return count(folded, sizes_of(plan, folded.state, batch), hardware.topology(plan).cpu)


def simulated(
    folded: AnalyzedStep,
    plan: Plan,
    hardware: Hardware,
    *,
    batch: int | None = None,
    events: bool = True,
    counts: Mapping[Node, OpCounts] | None = None,
    staged: Staged | None = None,
) -> Simulation:
    """Predict one step of a folded graph.

    Args:
        plan: the plan to price; its edges are found if it has none.
        batch: examples of the global batch, where the graph does not say.
        events: include events, memory over time and the cost of nodes in the result.
        counts: the result of `counted`; None: it is computed.
        staged: the result of `divided`; None: it is computed.
    """
    resolved = folded.resolve(plan if plan.edges or not batch else replace(plan, batch=batch))
    notes: tuple[str, ...] = ()
    if not (folded.state.semantics.extent.units or batch or plan.batch):
        notes = (f"{EXAMPLES} examples for each replica are assumed",)
    sizes = sizes_of(plan, folded.state, batch)
    topology = hardware.topology(resolved)
    if plan.looped:
        notes += ("a loop is played as the copies that do the same; its iterations take a little more",)
    if plan.pipeline is not None:
        staged = staged or divided(folded, resolved, counts or count(folded, sizes, topology.cpu))
        return _in_stages(staged, plan, resolved, topology, sizes, notes)
    with no_garbage_collection():
        built = build(folded, resolved, topology, sizes, counts)
        seconds = simulate_events(built.tasks, built.cores) + topology.machine.run_seconds + topology.remote_seconds
        devices = device_uses(folded, resolved, built, topology, lines=events)
    brought = (ExchangeUse(name, kind, (name,), nbytes) for name, kind, nbytes in built.brought)
    places = {id(task): task.place for task in built.tasks if task.place}
    return Simulation(
        step_seconds=seconds,
        exposed_seconds=_exposed(built.tasks, topology.computing),
        bubble=0.0,
        devices=tuple(use for use, _ in devices),
        links=tuple(_links(built.tasks, topology)),
        exchanges=(*_exchanges((group for group, _ in built.groups), plan), *brought, *_sent(built, topology)),
        replicas=plan.replicas,
        batch=sizes.batch,
        events=tuple(_events(built.tasks, places)) if events else (),
        notes=notes,
        exchanged_bytes=exchanged_bytes(resolved.edges),
        nodes=node_uses(folded, built, max(devices, key=lambda pair: pair[0].peak_bytes)[1]) if events else (),
    )


def _in_stages(
    staged: Staged, asked: Plan, plan: Plan, topology: Topology, sizes: Sizes, notes: tuple[str, ...]
) -> Simulation:
    """Predict one step of a pipeline."""
    with no_garbage_collection():
        step, seconds = played(staged, plan, topology, sizes)
        devices = devices_of(step, plan, topology, sizes, asked.residences)
    tasks = step.all_tasks
    return Simulation(
        step_seconds=seconds + topology.machine.run_seconds,
        exposed_seconds=_exposed(tasks, {lane for task in step.tasks.values() for lane in task.holds}),
        bubble=bubble_of(step),
        devices=devices,
        links=tuple(_links(tasks, topology)),
        exchanges=tuple(exchanges_of(step)),
        replicas=plan.replicas,
        batch=sizes.batch,
        events=tuple(_events(tasks, step.places)),
        notes=notes,
        exchanged_bytes=exchanged_bytes(plan.edges),
        nodes=staged_uses(step),
    )


def network_of(cluster: ConfigLike | Cluster | Network | None) -> Network | None:
    """Return the network that a configuration, or a section of one, describes.

    Raises:
        ConfigError: the configuration is wrong.
    """
    if cluster is None or isinstance(cluster, Network):
        return cluster
    if isinstance(cluster, Cluster):
        return cluster.network
    if isinstance(cluster, Mapping) and cluster.keys() <= Network.model_fields.keys():
        return Network(**cluster)
    section = Config.of(cluster).cluster
    return section.network if section is not None else None


def _exchanges(groups: Iterable[ExchangeGroup], plan: Plan) -> Iterator[ExchangeUse]:
    for group in groups:
        owners = tuple(dict.fromkeys(member.edge.owner for member in group.members))
        yield ExchangeUse(group.first.value, group.kind, owners, -(-group.sent // plan.period_of(group.first)))
        if group.handed_over:
            yield ExchangeUse(group.first.value, "hand_over", owners, group.handed_over)


def _sent(built: Built, topology: Topology) -> Iterator[ExchangeUse]:
    """Yield the copies between the logical devices of a replica."""
    for (value, lane, _), (move, _) in built.sent.items():
        if lane == topology.lanes[0]:
            yield ExchangeUse(value.name, "send", (MODEL_AXIS,), int(sum(move.traffic.values())))


def _links(tasks: list[Task], topology: Topology) -> list[LinkUse]:
    exchanges = [task for task in tasks if task.kind == EXCHANGE]
    busy = added(task.holds for task in exchanges)
    carried: Counter[str] = Counter()
    for lane, nbytes in (pair for task in exchanges for pair in task.traffic.items()):
        carried[lane] += int(nbytes)
    others = topology.processes * (topology.local - 1)
    counts = {lane: topology.processes for lane in (OUT, IN, LOCAL, LINK + FIRST)} | {LINK + REST: others}
    if topology.plan.pipeline is None:  # with stages, each link has a different name
        counts |= {lane: topology.plan.replicas for lane in carried if " to " in lane}
    used = sorted(lane for lane, nbytes in carried.items() if nbytes)
    return [LinkUse(lane, counts.get(lane, 1), carried[lane], busy.get(lane, 0.0)) for lane in used]


def _exposed(tasks: list[Task], lanes: set[str]) -> float:
    """Return the time in which something is exchanged while no replica computes."""
    changes = []
    for task in tasks:
        computes = task.kind == COMPUTE and not lanes.isdisjoint(task.holds)
        if task.end > task.start and (computes or task.kind == EXCHANGE):
            changes += [(task.start, 1, computes), (task.end, -1, computes)]
    exposed = before = 0.0
    computing = exchanging = 0
    for at, change, computes in sorted(changes):
        if exchanging and not computing:
            exposed += at - before
        before = at
        if computes:
            computing += change
        else:
            exchanging += change
    return exposed


def _events(tasks: list[Task], places: Mapping[int, str]) -> list[Event]:
    """Return the events of played tasks, by lane; by device if several devices share a lane.

    Args:
        places: devices of tasks, by `id(task)`.
    """
    found = [
        Event(task.name, places.get(id(task), lane), task.start, held, task.kind)
        for task in tasks
        for lane, held in task.holds.items()
        if held
    ]
    return sorted(found, key=lambda event: (event.start, event.lane, event.name))


# The memory and work of each device of a simulated step, and the cost of each node.
#
#     shared, 2 replicas on CPUs     cpu                  all replicas
#     mirrored                       first cpu device     what exists once, too      other cpu devices
#     a model axis of 2              CPU:0   CPU:1        the first replica's        CPU:2   CPU:3        the others'
#
# Identical devices share one row; logical devices have a row each. The cost of a node is its time, its memory at the
# peak, and the exchange of its outputs. The seconds of all nodes add up to the busy time of the first device of a
# process (and of its servers).


@dataclass(frozen=True)
class DeviceContent:
    """The memory and work of one kind of device.

    Attributes:
        name: shown to users.
        count: how many there are.
        busy: seconds that one of them computes.
        work: FLOPs and bytes of one of them.
    """

    name: str
    count: int
    busy: float
    buffers: list[Buffer]
    work: tuple[float, float] = (0.0, 0.0)


def device_uses(
    folded: AnalyzedStep, plan: Plan, built: Built, topology: Topology, *, lines: bool
) -> list[tuple[DeviceUse, list[Buffer]]]:
    """Return the devices of a step that has been played, each with the buffers that are alive at its peak.

    Args:
        plan: resolved.
        lines: also find memory over time, activations and the buffers at the peak.
    """
    found = _on_logical_devices(built, topology) if topology.logical > 1 else _on_lanes(folded, built, topology)
    activations = _activations(folded, plan, built) if lines else frozenset()
    return [_use(one, activations, lines=lines) for one in found]


def _busy(built: Built, tasks: Iterable[Task]) -> dict[str, float]:
    """Return how long tasks keep each place busy; on a CPU, scaled as if they kept all cores busy."""
    computing = (task for task in tasks if task.kind == COMPUTE)
    return added({task.place or lane: held} for task in computing for lane, held in built.busy(task).items())


def _on_lanes(folded: AnalyzedStep, built: Built, topology: Topology) -> Iterator[DeviceContent]:
    busy = _busy(built, built.tasks)
    for lane in dict.fromkeys([*topology.lanes, *built.variable_bytes]):
        own = [buffer for buffer in built.buffers if buffer.place == lane]
        count = topology.processes
        if lane == REST:
            count *= topology.local - 1
        elif lane == OTHERS:
            continue  # `_cpu_devices` yields them with the first one
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
    """Yield the CPU devices of a process.

    With shared variables, the first device has all replicas' buffers; with mirrored ones, its replica's and those that
    exist once.

    Args:
        own: the buffers in the memory of the CPU.
        busy: seconds of all tasks, and of the tasks of nodes that run on each replica.
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
    """Yield the logical devices of the first replica, then those of the others, which lack values that exist once."""
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
    """Return FLOPs and bytes of a device: of nodes that run once, and of so many instances of all other nodes."""
    alone, each = (built.work.get((place, kind), (0.0, 0.0)) for kind in (False, True))
    return (alone[0] * once + each[0] * instances, alone[1] * once + each[1] * instances)


def _activations(folded: AnalyzedStep, plan: Plan, built: Built) -> frozenset[Buffer]:
    """Return the buffers that the forward pass makes and the backward pass reads."""
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
    """Return the largest holders of live memory: the makers of buffers; variables and other kept buffers in one sum."""
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


def _by_node(sums: Mapping[str, _Sums]) -> tuple[NodeUse, ...]:
    return tuple(NodeUse(name, **vars(one)) for name, one in sums.items() if any(vars(one).values()))


def node_uses(folded: AnalyzedStep, built: Built, alive: Iterable[Buffer]) -> tuple[NodeUse, ...]:
    """Return the cost of each node of a step that has been played; the exchange of a gradient counts for its variable.

    Args:
        alive: the buffers of the fullest device that are alive at its peak.
    """
    sums, node_of, variables = defaultdict[str, _Sums](_Sums), dict[Task, str](), folded.item.variables
    for node, tasks in built.tasks_of.items():
        node_of.update(dict.fromkeys(tasks, node.name))
    for group, tasks in built.groups:
        node_of.update(dict.fromkeys(tasks, group.members[0].value.node.name))
        exchanging = sum(task.seconds for task in tasks if task.kind != COMPUTE)
        for member in group.members:
            owner = member.edge.owner
            own = sums[variables[owner].handle if owner in variables else member.value.node.name]
            own.exchanged_bytes += member.sent
            own.exchange_seconds += exchanging * member.sent / max(1, group.sent)
    for task in built.tasks:
        if task.kind == COMPUTE:
            held = (seconds for lane, seconds in built.busy(task).items() if not lane.startswith(REST))
            sums[node_of.get(task, task.name)].seconds += sum(held)
    for buffer in alive:
        maker = node_of.get(buffer.maker, buffer.maker.name) if buffer.maker is not None else buffer.handle
        sums[maker].peak_bytes += buffer.nbytes
    return _by_node(sums)


def staged_uses(step: StagedStep) -> tuple[NodeUse, ...]:
    """Return the seconds of each node of a pipelined step, over all stages of one replica; memory is not per node."""
    sums = defaultdict[str, _Sums](_Sums)
    for part, nodes in step.staged.parts.items():
        for node, seconds in step.seconds_of(part, nodes):
            sums[node.name].seconds += seconds
    return _by_node(sums)
