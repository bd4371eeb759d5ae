"""`simulate`: predict one step of a distributed graph, without rewriting it and without TensorFlow.

item, plan, cluster ──► folded step ──► tasks ──► played event by event ──► step time, memory, links, trace

Identical devices and processes are folded into one, so that a thousand of them take no longer than two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.config.sections import Cluster, Network
from autograph_rewrite.cost.device_use import device_uses, node_uses, staged_uses
from autograph_rewrite.cost.hardware.machine import Machine, network_link
from autograph_rewrite.cost.hardware.topology import FIRST, IN, LOCAL, OUT, REST, Topology
from autograph_rewrite.cost.pipeline.utilization import use_of_pipeline
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep, fold, neutral
from autograph_rewrite.cost.step.op_counts import OpCounts, count
from autograph_rewrite.cost.tasks.communication import ExchangeGroup
from autograph_rewrite.cost.tasks.result import Event, ExchangeUse, LinkUse, Simulation
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Task, simulate_events
from autograph_rewrite.cost.tasks.task_graph import LINK, Built, build
from autograph_rewrite.diagnostics.faults import raise_if_any
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES, Sizes
from autograph_rewrite.passes.alternatives import add_alternatives
from autograph_rewrite.plan.parts.messages import MODEL_AXIS
from autograph_rewrite.plan.parts.names import exchanged_bytes
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify import VARIABLE_CHECKS, require
from autograph_rewrite.resolve.wire_types import sizes_of
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Hardware:
    """What a step runs on.

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
    """A predicted step, with what predictions of other plans have in common with it.

    Attributes:
        plan: as it was given.
        folded: the analysed step.
        counts: FLOPs and bytes by node.
        hardware: what it runs on.
        batch: examples of the global batch, as they were given.
        found: the prediction.
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
        cluster: what says how fast the network is: a configuration, its `cluster` or `network` section.
        batch: examples of all replicas together; left out, what the graph says, else 32 for each replica.
        machine: how fast its devices are; left out, round figures. `calibrate()` measures this one.

    Raises:
        GraphError: the graph has no batch input, or it has been distributed already.
        PlanError: the plan is not one for this graph.
    """
    if item.report is not None:
        raise GraphError("this item is distributed already", hint="simulate the original one, with new.report.plan")
    flat = normalise_original(item)
    stage("simulating a step")
    require(replace(neutral(plan), edges=()), flat)
    wrong = [plan.source.fault(*finding) for one in VARIABLE_CHECKS for finding in one(plan, flat)]
    raise_if_any(wrong, error=PlanError, title=plan.source.name)

    def predicted(plan: Plan) -> SimulatedStep:
        hardware, folded = Hardware(machine or Machine(), network_of(cluster)), fold(flat, plan, batch)
        counts = counted(folded, plan, hardware, batch)
        found = simulated(folded, plan, hardware, batch=batch, counts=counts)
        return SimulatedStep(plan, folded, counts, hardware, batch, found)

    try:
        return predicted(plan)
    except PlanError as error:
        add_alternatives(error, plan, predicted)
        raise


def counted(folded: AnalyzedStep, plan: Plan, hardware: Hardware, batch: int | None) -> Mapping[Node, OpCounts]:
    """Return FLOPs and bytes by node, which do not depend on placements of variables."""
    return count(folded, sizes_of(plan, folded.state, batch), hardware.topology(plan).cpu)


def simulated(
    folded: AnalyzedStep,
    plan: Plan,
    hardware: Hardware,
    *,
    batch: int | None = None,
    events: bool = True,
    counts: Mapping[Node, OpCounts] | None = None,
) -> Simulation:
    """Predict one step of what has been folded already, without events if nobody wants them.

    Args:
        folded: the analysed step.
        plan: what to price; its edges are found if it has none.
        hardware: what the step runs on.
        batch: examples of the global batch, where the graph does not say.
        events: play the tasks, instead of only adding their work up.
        counts: FLOPs and bytes by node, counted before.
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
        return _in_stages(folded, resolved, topology, sizes, notes, counts)
    with no_garbage_collection():
        built = build(folded, resolved, topology, sizes, counts)
        seconds = simulate_events(built.tasks, built.cores) + topology.machine.run_seconds + topology.remote_seconds
        devices = device_uses(folded, resolved, built, topology, lines=events)
    return Simulation(
        step_seconds=seconds,
        exposed_seconds=_exposed(built.tasks, topology.computing),
        bubble=0.0,
        devices=tuple(use for use, _ in devices),
        links=tuple(_links(built.tasks, topology)),
        exchanges=(*_exchanges((group for group, _ in built.groups), plan), *_sent(built, topology)),
        replicas=plan.replicas,
        batch=sizes.batch,
        events=tuple(_events(built.tasks, {id(task): task.place for task in built.tasks if task.place}))
        if events
        else (),
        notes=notes,
        exchanged_bytes=exchanged_bytes(resolved.edges),
        nodes=node_uses(folded, built, max(devices, key=lambda pair: pair[0].peak_bytes)[1]) if events else (),
    )


def _in_stages(
    folded: AnalyzedStep,
    plan: Plan,
    topology: Topology,
    sizes: Sizes,
    notes: tuple[str, ...],
    counts: Mapping[Node, OpCounts] | None,
) -> Simulation:
    """Predict one step of a pipeline."""
    with no_garbage_collection():
        used = use_of_pipeline(folded, plan, topology, sizes, counts)
    tasks = used.step.all_tasks
    return Simulation(
        step_seconds=used.seconds + topology.machine.run_seconds,
        exposed_seconds=_exposed(tasks, set(used.lanes)),
        bubble=used.bubble,
        devices=used.devices,
        links=tuple(_links(tasks, topology)),
        exchanges=used.exchanges,
        replicas=plan.replicas,
        batch=sizes.batch,
        events=tuple(_events(tasks, used.step.places)),
        notes=notes,
        exchanged_bytes=exchanged_bytes(plan.edges),
        nodes=staged_uses(used.step),
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
    """Yield what crosses between the logical devices of a replica."""
    for (value, lane, _), (move, _) in built.sent.items():
        if lane == topology.lanes[0]:
            yield ExchangeUse(value.name, "send", (MODEL_AXIS,), int(sum(move.traffic.values())))


def _links(tasks: list[Task], topology: Topology) -> list[LinkUse]:
    carried: Counter[str] = Counter()
    busy: dict[str, float] = {}
    for task in tasks:
        if task.kind == EXCHANGE:
            for lane, nbytes in task.traffic.items():
                carried[lane] += int(nbytes)
            for lane, held in task.holds.items():
                busy[lane] = busy.get(lane, 0.0) + held
    others = topology.processes * (topology.local - 1)
    counts = {lane: topology.processes for lane in (OUT, IN, LOCAL, LINK + FIRST)} | {LINK + REST: others}
    if topology.plan.pipeline is None:  # with stages, each link has its own name
        counts |= {lane: topology.plan.replicas for lane in carried if " to " in lane}
    return [
        LinkUse(lane, counts.get(lane, 1), carried[lane], busy.get(lane, 0.0))
        for lane in sorted(carried)
        if carried[lane]
    ]


def _exposed(tasks: list[Task], lanes: set[str]) -> float:
    """Return for how long something is exchanged while no replica computes."""
    changes = []
    for task in tasks:
        if task.end > task.start:
            computes = task.kind == COMPUTE and not lanes.isdisjoint(task.holds)
            if computes or task.kind == EXCHANGE:
                changes.append((task.start, 1, computes))
                changes.append((task.end, -1, computes))
    changes.sort()
    exposed = before = 0.0
    computing = exchanging = 0
    for at, change, computes in changes:
        if exchanging and not computing:
            exposed += at - before
        before = at
        if computes:
            computing += change
        else:
            exchanging += change
    return exposed


def _events(tasks: list[Task], places: Mapping[int, str] = MappingProxyType({})) -> list[Event]:
    """Return what happens on each lane; where several devices share one, by the device.

    Args:
        tasks: as they were played.
        places: devices of tasks, by the identity of the task.
    """
    found = [
        Event(task.name, places.get(id(task), lane), task.start, held, task.kind)
        for task in tasks
        for lane, held in task.holds.items()
        if held
    ]
    return sorted(found, key=lambda event: (event.start, event.lane, event.name))
