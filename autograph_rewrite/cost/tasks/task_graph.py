"""Build the tasks and buffers of a step from the analysed step and a plan.

    node ──► (value) ──► exchange of the plan's edge ──► node          pull ──► read of a variable on servers
                         push to a server ──► its update, there

The tasks of exchanges are made first, so that nodes find the tasks that they wait for; the nodes that feed an exchange
are connected at the end. On a model axis each node is on its logical device, and a value that another device reads is
sent to it once:

    MatMul on device 1 ──► copy over "CPU:1 to CPU:0" ──► AddN on device 0

CPU devices of a process share memory, so the value stays where it was made until its last reader has ended.

With accelerators, the host computes the nodes that have no kernel there, and tensors are copied:

    x (fed) ══ host link ══► MatMul        words = AsString(h)    on the host's cores, h is copied first

Where the shards of a table are on several servers, all rows of an update are sent to the first server, which merges
them and hands each shard's rows on. (A dense gradient is split before it is sent.)

    rows of every process ──► server 0: Unique, sum ──► update of shard 0
                                            └─ share of shard 1 ──► server 1: update of shard 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from autograph_rewrite.analysis.accelerator import crossings, host_nodes, host_of, is_accelerator, place
from autograph_rewrite.analysis.op_work import Work
from autograph_rewrite.cost.hardware.topology import HOST, Holding, Topology
from autograph_rewrite.cost.tasks.communication import ExchangeGroup, exchange_task, groups, pass_task, tasks_of
from autograph_rewrite.cost.tasks.step import AnalyzedStep, OpCounts, count
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Buffer, Task, compute_seconds, on_cores
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.variable_ops import updates_rows
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import STEP
from autograph_rewrite.plan.plan import Plan

# Reads of variables that are not on the replica: a pull from servers, or an all-gather of shards.
#
# shards here     ConcatV2 ──► ReadVariableOp
# on servers      pull ──► ReadVariableOp          ResourceGather: only its rows are pulled, not the table
# stage 1, 2      gather of the updated shards ──► ReadVariableOp
# stage 3         gather ──► forward readers,  gather again ──► backward readers


class Pulled(NamedTuple):
    """The tasks that a read waits for, and the buffer that it reads."""

    tasks: tuple[Task, ...] = ()
    buffer: Buffer | None = None


class Reads:
    """Makes the exchanges that bring variables to their readers.

    Attributes:
        brought: the variable, kind and bytes that one member hands over, of each exchange.
    """

    def __init__(self, folded: AnalyzedStep, held: Mapping[str, Holding], topology: Topology, sizes: Sizes) -> None:
        self._folded, self._held, self._topology, self._sizes = folded, held, topology, sizes
        self._chains: dict[tuple[str, str], list[Task]] = {}  # each task waits for the one before
        self._buffers: dict[tuple[str, str, str], Buffer] = {}
        self._gathered: dict[Buffer, str] = {}  # buffers that are freed between forward and backward pass
        self._times = topology.plan.microbatches if topology.plan.gathers_for_each else 1
        self.brought: list[tuple[str, str, int]] = []
        self.regathers = any(holder.gathers for holder in held.values())
        outputs = [value.node for value in folded.outputs] if self.regathers else ()
        self._forward = ancestors(outputs, controls=False)

    def of(self, node: Node, lane: str) -> Pulled:
        """Return the exchange that brings the variable of a node; nothing if the replica holds it."""
        name = self._folded.variable_of(node) if self._held else None
        holder = self._held.get(name) if name is not None else None
        if holder is None or name is None or self._folded.region.get(node) == name or has(node.op, "declares"):
            return Pulled()
        what = node.name if has(node.op, "reads_rows") else "whole"
        if not (holder.is_apart or holder.is_shared_out):
            return self._join(name, lane) if holder.parts > 1 and not has(node.op, "reads_rows") else Pulled()
        if holder.is_shared_out:
            pulled = self._gather(name, what, lane, kept=not holder.gathers)
            if holder.gathers and pulled.buffer is not None:
                self._gathered[pulled.buffer] = name
            return pulled
        return self._pull(node, name, what, lane)

    def again(self, made: Buffer, node: Node, waits: Sequence[Task | None]) -> Pulled | None:
        """Return the second gather of a variable for a backward reader; None if the whole is still there.

        Args:
            made: the buffer that the forward pass gathered.
            waits: the producers of the reader's other inputs, which the gather waits for: it is not needed before.
        """
        name = self._gathered.get(made)
        if name is None or node in self._forward or self._folded.region.get(node) == name:
            return None
        begins = (name, "again") not in self._chains
        pulled = self._gather(name, "again", made.place)
        if begins:
            self._chains[name, "again"][0].after(waits)
        return pulled

    def _gather(self, name: str, what: str, lane: str, *, kept: bool = False) -> Pulled:
        """Return the gather of all shards; replicas that keep the whole need no buffer for it."""
        whole = self._folded.item.variables[name].nbytes
        if (name, what) not in self._chains:
            times = 1 if kept else self._times
            block = times * whole / self._topology.plan.replicas
            exchange = self._topology.ring_gather(block)
            self.brought.append((name, "all_gather", int(block)))
            sent = exchange_task(f"gather {name}", "all_gather", exchange)
            join = self._joining(name, times * (1 if self._topology.on_cpu else self._topology.local))
            join.after([sent])
            self._chains[name, what] = [sent, join]
        return self._held_on(name, what, lane, 0 if kept else whole, each=True)

    def _pull(self, node: Node, name: str, what: str, lane: str) -> Pulled:
        """Return the pull of a variable on servers, or of the rows of it that a node gathers on all replicas."""
        nbytes = self._folded.item.variables[name].nbytes
        if has(node.op, "reads_rows"):
            rows = self._sizes.nbytes(self._folded.state.source(node.output()))
            nbytes = rows * (self._topology.local if node in self._folded.each else 1)
        if (name, what) not in self._chains:
            exchange = self._topology.pull(nbytes, *self._held[name].homes)
            self.brought += [(name, "pull", nbytes)] if exchange.traffic else []
            self._chains[name, what] = [exchange_task(f"pull {name}", "pull", exchange)]
        is_there = has(node.op, "reads_rows") or not self._chains[name, what][0].traffic
        if is_there and self._held[name].parts > 1 and not has(node.op, "reads_rows"):
            joined = self._join(name, lane, each=False)
            joined.tasks[0].after(self._chains[name, what])
            return joined
        return self._held_on(name, what, lane, 0 if is_there else nbytes, each=False)

    def _join(self, name: str, lane: str, *, each: bool = True) -> Pulled:
        """Return the join of shards that are all in this process."""
        if (name, "joined") not in self._chains:
            self._chains[name, "joined"] = [self._joining(name, self._topology.local if each else 1)]
        nbytes = self._folded.item.variables[name].nbytes
        return self._held_on(name, "joined", lane, nbytes, each=each)

    def _joining(self, name: str, instances: int) -> Task:
        """Return the task that copies shards into the whole."""
        work = Work("elementwise", 0.0, 2.0 * self._folded.item.variables[name].nbytes)
        return pass_task(f"join {name}", "ConcatV2", work, instances, self._topology)

    def _held_on(self, name: str, what: str, lane: str, nbytes: int, *, each: bool) -> Pulled:
        """Return the last task of a chain, with its buffer on one lane."""
        task = self._chains[name, what][-1]
        key = (name, what, lane)
        if key not in self._buffers:
            self._buffers[key] = Buffer(nbytes, lane, each, task)
        return Pulled((task,), self._buffers[key])

    @property
    def tasks(self) -> list[Task]:
        """All exchanges and joins."""
        return [task for chain in self._chains.values() for task in chain]

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers of their results."""
        return list(self._buffers.values())


LINK = "host link of "
"""Prefix of the lane of a link; the lane of its devices follows."""


@dataclass(frozen=True)
class HostUse:
    """The host's part in a step on accelerators.

    Attributes:
        nodes: the nodes that the host computes.
        moved: values that are copied between host and device, each with a reader.
    """

    nodes: frozenset[Node] = frozenset()
    moved: frozenset[tuple[Value, Node]] = frozenset()


def host_use(folded: AnalyzedStep, topology: Topology) -> HostUse:
    """Return what a step does on the host; nothing if replicas are on CPUs, or kernels are not known."""
    device = topology.plan.devices_of(0)[0]
    if not is_accelerator(device):
        return HostUse()
    home, nodes = host_of(device), folded.order
    names = {info.tensor.partition(":")[0] for info in folded.item.inputs.values()}
    fed = {node for node in nodes if node.name in names}

    def requested(node: Node) -> str:
        return home if "CPU" in node.device.upper() else device

    there = host_nodes(nodes, requested, fed, folded.frames)
    placed = place(nodes, lambda node: home if node in there else requested(node), fed)
    found = crossings(dict.fromkeys(nodes), placed, fed, ())
    computed = (node for node, one in placed.items() if not is_accelerator(one.device) and node not in fed)
    return HostUse(frozenset(computed), frozenset((one.value, reader) for one in found for reader in one.readers))


@dataclass
class Built:
    """The tasks of one step.

    Attributes:
        buffers: the buffers that they make and read, variables included.
        cores: how many tasks a lane takes at a time, for lanes that take several.
        groups: the exchanges of the plan's edges, each with its tasks.
        variable_bytes: of one instance of a device, by lane.
        work: FLOPs and bytes of one instance, by device and whether every replica has one.
        sent: values sent to another logical device, each with the copy and the buffer there.
        brought: as for `Reads`.
    """

    tasks: list[Task] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    cores: dict[str, int] = field(default_factory=dict)
    groups: list[tuple[ExchangeGroup, list[Task]]] = field(default_factory=list)
    variable_bytes: dict[str, int] = field(default_factory=dict)
    work: dict[tuple[str, bool], tuple[float, float]] = field(default_factory=dict)
    tasks_of: dict[Node, list[Task]] = field(default_factory=dict)
    sent: dict[tuple[Value, str, int], tuple[Task, Buffer]] = field(default_factory=dict)
    brought: list[tuple[str, str, int]] = field(default_factory=list)

    def busy(self, task: Task) -> dict[str, float]:
        """Return how long a task keeps each lane busy, on a CPU scaled as if it kept all cores busy."""
        return {lane: held * task.width / self.cores.get(lane, 1) for lane, held in task.holds.items()}


def build(
    folded: AnalyzedStep, plan: Plan, topology: Topology, sizes: Sizes, counts: Mapping[Node, OpCounts] | None = None
) -> Built:
    """Return the tasks of one step under a resolved plan."""
    builder = TaskGraphBuilder(folded, plan, topology, sizes, counts or count(folded, sizes, topology.cpu))
    builder.run()
    return builder.built


class TaskGraphBuilder:
    """Makes the tasks of one step."""

    def __init__(
        self, folded: AnalyzedStep, plan: Plan, topology: Topology, sizes: Sizes, counts: Mapping[Node, OpCounts]
    ) -> None:
        self.folded, self.plan, self.topology, self.sizes, self.counts = folded, plan, topology, sizes, counts
        self.holdings = topology.holdings
        self.meetings = meeting_places(folded, self.holdings)
        self.once = self._made_once()
        self.each = folded.each - self.once
        meets = not plan.gathers_for_each and any(holder.gathers for holder in self.holdings.values())
        self.together = plan.microbatches if meets else 1  # all run at once where a variable is gathered once for all
        self.built = Built()
        self.reads = Reads(folded, self.holdings, topology, sizes)
        self.values: dict[tuple[Value, str], Buffer] = {}  # by value and lane
        self.ends: dict[tuple[Node, str], Task] = {}
        self.exchanged: dict[tuple[str, str], Task] = {}  # the last task of an exchange, by value and target
        self.results: dict[tuple[str, str, str], Buffer] = {}  # its results, by value, target and lane
        self.moves: dict[Value, Task] = {}
        self.logical = LogicalDevices(folded, topology, self.built.tasks, self.built.buffers)
        self.host = host_use(folded, topology)
        self.crossed: dict[tuple[Value, str], Task] = {}
        held = (home for holder in self.holdings.values() if holder.is_apart for home in holder.homes)
        lanes = {topology.compute_lane(home) for home in held} - {*topology.lanes}
        own = topology.computing if topology.on_cpu else {HOST} if self.host.nodes else set()
        self.built.cores.update(dict.fromkeys(sorted(lanes | own), topology.machine.cores))

    def run(self) -> None:
        """Make all tasks and buffers."""
        self._hold_variables()
        found = groups(self.folded, self.plan.edges, self.meetings, self.sizes)
        starts = [(group, self._exchange(group)) for group in found]
        for node in self.folded.order:
            for lane in self._lanes(node):
                self._compute(node, lane)
        for group, first in starts:
            for member in group.members:
                self._feed(first, member.value)
        self.built.tasks += self.reads.tasks
        self.built.buffers += self.reads.buffers
        self.built.brought += self.reads.brought
        self.built.sent = self.logical.sent
        self.logical.put_rest()

    # Where things are.

    def _holder(self, node: Node) -> Holding | None:
        """Return who computes the update that a node belongs to, if that is not every replica."""
        name = self.folded.region.get(node)
        if name is None or node in self.once:
            return None
        return (self.holdings if self.folded.variable_of(node) else self.meetings).get(name)

    def _made_once(self) -> frozenset[Node]:
        """Return the nodes that run once, on the first device, although another device holds their variable."""
        if self.topology.processes > 1:
            return frozenset()
        held = {name for name, holder in self.holdings.items() if holder.homes}
        return frozenset(node for node in self.folded.beside if self.folded.region[node] in held)

    def _lanes(self, node: Node) -> tuple[str, ...]:
        holder, own = self._holder(node), self.topology.lanes
        if holder is not None and holder.is_apart:
            return (self.topology.compute_lane(holder.homes[0]),)
        if holder is not None and holder.is_shared_out:
            return own
        return own if node in self.each else own[:1]

    def _hold_variables(self) -> None:
        owners = {name: use.owner or name for name, use in self.folded.uses.items()}
        mirrored = self.plan.mode == "mirrored"
        for name, variable in self.folded.item.variables.items():
            nbytes, own = variable.nbytes, self.topology.lanes
            owner = owners.get(name, name)
            keep = partial(self._keep, is_slot=owner != name, handle=variable.handle)
            device = self.logical.of(self.folded.state.graph.nodes.get(variable.handle))
            holder = self.holdings.get(owner)
            if holder is not None and holder.is_apart:
                for home in holder.homes:
                    keep(nbytes // holder.parts, self.topology.memory_lane(home))
            elif holder is not None and holder.is_shared_out and (holder.gathers or name != owner):
                for lane in own:
                    keep(nbytes // self.plan.replicas, lane, each=True)
            else:
                for lane in own if mirrored else own[:1]:
                    keep(nbytes, self.topology.place(lane, device), each=mirrored)

    def _keep(self, nbytes: int, lane: str, *, each: bool = False, is_slot: bool = False, handle: str = "") -> None:
        self.built.variable_bytes[lane] = self.built.variable_bytes.get(lane, 0) + nbytes
        self.built.buffers.append(Buffer(nbytes, lane, each, kept=True, is_slot=is_slot, handle=handle))

    # Exchanges.

    def _exchange(self, group: ExchangeGroup) -> Task:
        """Make the tasks of a group and the buffers of its results; return the first task."""
        chain = list(tasks_of(group, self.topology)) or [Task(group.name, COMPUTE, group.kind, {}, 0.0)]
        chain = [task.once_in(self.plan.period_of(group.first)) for task in chain]
        for before, after in pairwise(chain):
            after.needs.append(before)
        device = group.first.logical
        for task in chain:
            self.logical.put(task, device)
        self.built.tasks += chain
        self.built.groups.append((group, chain))
        for lane in self.topology.lanes if group.residual else ():
            self._keep(group.residual, lane, each=True)
        for lane in self.topology.lanes if group.scratch else ():
            self._buffer(group.scratch, self.topology.place(lane, device), chain[0], each=True)
        self._sum_up(group, chain[0])
        for member in group.members:
            key = (member.edge.value, member.edge.to)
            if member.edge.role and key in self.exchanged:  # the second exchange of one value
                chain[0].needs.append(self.exchanged[key])
            self.exchanged[key] = chain[-1]
            lanes, result = self.topology.lanes, member.result
            if group.holder is not None and group.holder.is_apart:
                lanes = (self.topology.compute_lane(group.holder.homes[0]),)
                result //= group.holder.parts
            elif group.kind == "reduce_scatter":
                result //= self.plan.replicas
            elif not group.is_everywhere:
                lanes = lanes[:1]
            for lane in lanes:
                place = self.topology.place(lane, device)
                self.results[key[0], key[1], lane] = self._buffer(result, place, chain[-1], each=group.is_everywhere)
        return chain[0]

    def _sum_up(self, group: ExchangeGroup, reader: Task) -> None:
        """Add the buffers in which each replica sums the gradients of its micro-batches, from the first one on."""
        if self.plan.microbatches == 1 or group.first.owner == STEP or not group.first.from_.startswith("partial"):
            return
        first = Task(f"first of {group.first.value}", COMPUTE, "sum", {}, 0.0)
        self.built.tasks.append(first)
        for lane in self.topology.lanes:
            place = self.topology.place(lane, group.first.logical)
            self._buffer(sum(one.whole for one in group.members), place, first, each=True).readers.append(reader)

    def _buffer(self, nbytes: int, lane: str, maker: Task, *, each: bool) -> Buffer:
        made = Buffer(nbytes, lane, each, maker)
        self.built.buffers.append(made)
        return made

    def _feed(self, task: Task, value: Value) -> None:
        """Make an exchange wait for and read a value on all lanes."""
        for lane in self.topology.lanes:
            end, made = self.ends.get((value.node, lane)), self.values.get((value, lane))
            task.after([end])
            if made is not None:
                made.readers.append(task)

    # Nodes.

    def _compute(self, node: Node, lane: str) -> None:
        holder = self._holder(node)
        task = self._task(node, lane, holder)
        read = [self._input(task, node, index, lane) for index in range(len(node.inputs))]
        for index, made in enumerate(read) if self.reads.regathers else ():
            beside = [self.ends.get((value.node, lane)) for i, value in enumerate(node.inputs) if i != index]
            again = self.reads.again(made, node, beside) if made is not None else None
            if again is not None:
                read[index] = again.buffer
                task.after(again.tasks)
        task.after(self.ends.get((control, lane)) for control in node.controls)
        if holder is not None and holder.is_apart:
            self._hand_on(task, node, holder, lane)
        if lane in self.topology.lanes:
            task.after([self._cross(value, lane) for value in node.inputs if (value, node) in self.host.moved])
        pulled = self.reads.of(node, lane)
        task.after(pulled.tasks)
        if pulled.buffer is not None:
            read.insert(0, pulled.buffer)
        for made in read:
            if made is not None:
                made.readers.append(task)
        self.logical.put(task, self.logical.of(node))
        self.built.tasks.append(task)
        self.built.tasks_of.setdefault(node, []).append(task)
        self.ends[node, lane] = task
        self._outputs(node, lane, task, holder, read)

    def _hand_on(self, task: Task, node: Node, holder: Holding, lane: str) -> None:
        """Make an update of rows wait until all servers of its table have their rows; one process may have all."""
        rows = self.counts[node].rows  # bytes
        exchange = self.topology.hand_on(rows, *holder.homes)
        if rows and exchange.seconds:
            handed = exchange_task(f"rows of {node.name}", "hand_on", exchange)
            handed.after(self.ends.get((value.node, lane)) for value in node.inputs)
            task.after([handed])
            self.built.tasks.append(handed)

    def _task(self, node: Node, lane: str, holder: Holding | None) -> Task:
        """Return the task of all instances of a node on a lane."""
        machine, counted = self.topology.machine, self.counts[node]
        work, runs, reuses = counted.work, counted.runs, counted.reuses
        if holder is not None and holder.is_apart:
            return self._apart(node, work, holder, reuses)
        instances = self.topology.local if node in self.each or (holder and holder.is_shared_out) else 1
        self._note(node, lane, work, runs)
        if holder is not None and holder.is_shared_out:
            work = Work(work.family, work.flops / self.plan.replicas, work.nbytes / self.plan.replicas)
        shards = holder.parts if holder is not None and not holder.is_shared_out else 1
        if self.topology.on_cpu:
            seconds, width = on_cores(work, instances, machine, runs)
            seconds += (shards - 1) * machine.core.op_seconds
            return Task(node.name, COMPUTE, node.op, {lane: seconds}, seconds, width, reuses=reuses)
        if node in self.host.nodes:
            seconds, width = on_cores(work, instances, machine, runs)
            return Task(node.name, COMPUTE, node.op, {HOST: seconds}, seconds, width, reuses=reuses)
        each = machine.accelerator
        seconds = (compute_seconds(work, each) + each.op_seconds * shards) * runs
        return Task(node.name, COMPUTE, node.op, {lane: seconds}, seconds, reuses=reuses)

    def _note(self, node: Node, lane: str, work: Work, runs: int) -> None:
        """Add the work of one instance to that of its device."""
        key = (self.topology.place(lane, self.logical.of(node)), node in self.each)
        flops, nbytes = self.built.work.get(key, (0.0, 0.0))
        self.built.work[key] = flops + work.flops * runs, nbytes + work.nbytes * runs

    def _apart(self, node: Node, work: Work, holder: Holding, reuses: bool) -> Task:
        """Return the task of an update's node on all servers of the variable."""
        shard = Work(work.family, work.flops / holder.parts, work.nbytes / holder.parts)
        seconds, width = on_cores(shard, 1, self.topology.machine)
        holds: dict[str, float] = {}
        for home in holder.homes:
            lane = self.topology.compute_lane(home)
            holds[lane] = holds.get(lane, 0.0) + seconds
        return Task(node.name, COMPUTE, node.op, holds, max(holds.values()), width, reuses=reuses)

    def _input(self, task: Task, node: Node, index: int, lane: str) -> Buffer | None:
        """Make a task wait for an input; return the buffer that it reads."""
        value, first = node.inputs[index], self.topology.lanes[0]
        key = value.name, self.counts[node].targets[index] or ""
        end = self.exchanged.get(key)
        if end is not None:
            own, other = (self.results.get((*key, at)) for at in (lane, first))
            travels = True
        else:
            own, other = (self.values.get((value, at)) for at in (lane, first))
            end = self.ends.get((value.node, lane if own is not None else first))
            travels = not has(value.node.op, "held")
        task.after([end])
        if own is None and other is not None and travels and lane in self.topology.lanes:
            task.after([self._moved(value, other)])  # the value was made once, on the first device
        return self.logical.brought(task, value, own or other, self.logical.of(node), lane)

    def _moved(self, value: Value, made: Buffer) -> Task | None:
        """Return the task that copies a value from the first device to the others; None if it takes no time."""
        exchange = self.topology.within(made.nbytes * (self.topology.local - 1))
        if not exchange.seconds:
            return None
        if value not in self.moves:
            task = exchange_task(f"copy {value.name}", "copy", exchange)
            task.after([made.maker])
            self.built.tasks.append(task)
            self.moves[value] = task
        return self.moves[value]

    def _cross(self, value: Value, lane: str) -> Task:
        """Return the task that copies a value over the link between a lane's devices and their host."""
        if (value, lane) not in self.crossed:
            nbytes = dict(self.counts[value.node].made).get(value, 0)
            link, seconds = LINK + lane, self.topology.machine.host.time(nbytes)
            task = Task(f"copy {value.name}", EXCHANGE, "host", {link: seconds}, seconds, traffic={link: nbytes})
            task.after([self.ends.get((value.node, lane)) or self.ends.get((value.node, self.topology.lanes[0]))])
            self.built.tasks.append(task)
            self.crossed[value, lane] = task
        return self.crossed[value, lane]

    def _outputs(self, node: Node, lane: str, task: Task, holder: Holding | None, read: list[Buffer | None]) -> None:
        """Add the buffers of a node's outputs; a view shares the buffer that it reads."""
        own = next((made for made in read if made is not None), None)
        share = self.plan.replicas if holder is not None and holder.is_shared_out else 1
        share = holder.parts if holder is not None and holder.is_apart else share
        counted = self.counts[node]
        needed = counted.scratch * (self.together if node in self.each else 1) + counted.patches
        if needed:
            place = self.topology.place(lane, self.logical.of(node))
            scratch = self._buffer(needed // share, place, task, each=node in self.each)
            scratch.is_scratch = True
        for value, nbytes in counted.made:
            if counted.hands_on:
                if own is not None:
                    self.values[value, lane] = own
                continue
            each = node in self.each or bool(holder and holder.is_shared_out)
            times = self.together if node in self.each else 1
            if value in self.folded.state.whole_inputs and self.topology.on_cpu:
                times = self.topology.local  # the process is fed the blocks of all its replicas
            place = self.topology.place(lane, self.logical.of(node))
            made = self._buffer(nbytes * times // share, place, task, each=each)
            made.kept = has(node.op, "held") or value in self.folded.outputs
            self.values[value, lane] = made


class LogicalDevices:
    """Puts tasks and buffers on logical devices; does nothing without a model axis.

    Args:
        tasks: the list to which copy tasks are added.
        buffers: the list to which their buffers are added.
    """

    def __init__(self, folded: AnalyzedStep, topology: Topology, tasks: list[Task], buffers: list[Buffer]) -> None:
        self._logical, self._topology, self._tasks, self._buffers = folded.logical, topology, tasks, buffers
        self.sent: dict[tuple[Value, str, int], tuple[Task, Buffer]] = {}

    def of(self, node: Node | None) -> int:
        """Return the logical device of a node."""
        return self._logical.get(node, 0) if node is not None else 0

    def put(self, task: Task, device: int) -> None:
        """Put a task on a logical device, if it computes on a replica."""
        own = [lane for lane in task.holds if lane in self._topology.lanes]
        if self._topology.logical > 1 and task.kind == COMPUTE and own:
            task.place = self._topology.place(own[0], device)
            task.holds = {self._topology.computes(lane, device): seconds for lane, seconds in task.holds.items()}

    def put_rest(self) -> None:
        """Put tasks and buffers that are on no logical device on the first one."""
        if self._topology.logical == 1:
            return
        places = {lane: self._topology.place(lane, 0) for lane in self._topology.lanes}
        for buffer in self._buffers:
            buffer.place = places.get(buffer.place, buffer.place)
        for task in self._tasks:
            if not task.place:
                self.put(task, 0)

    def brought(self, task: Task, value: Value, found: Buffer | None, target: int, lane: str) -> Buffer | None:
        """Make a task wait until a value has arrived on its logical device; return the buffer that it reads there.

        Args:
            task: the reader.
            found: the buffer where the value was made.
            target: the logical device of the reader.
            lane: of the reader.
        """
        source = self.of(value.node)
        if source == target or found is None or not found.nbytes or found.kept or lane not in self._topology.lanes:
            return found
        key = (value, lane, target)
        if key not in self.sent:
            self.sent[key] = self._send(value, found, target, lane)
        move, arrived = self.sent[key]
        task.after([move])
        return arrived

    def _send(self, value: Value, found: Buffer, target: int, lane: str) -> tuple[Task, Buffer]:
        """Return the copy task of a value, and the buffer on the target."""
        exchange = self._topology.between(found.nbytes, self.of(value.node), target)
        move = exchange_task(f"copy {value.name}", "copy", exchange)
        move.after([found.maker])
        self._tasks.append(move)
        if not exchange.holds:
            return move, found
        found.readers.append(move)
        arrived = Buffer(found.nbytes, self._topology.place(lane, target), found.each, move)
        self._buffers.append(arrived)
        return move, arrived


def meeting_places(folded: AnalyzedStep, holdings: Mapping[str, Holding]) -> dict[str, Holding]:
    """Return where the nodes of each variable's update run: where it lives; for row updates, on its first server."""

    def place(name: str, holder: Holding) -> Holding:
        by_rows = name in folded.uses and any(map(updates_rows, folded.uses[name].updates))
        return replace(holder, homes=holder.homes[:1], parts=1) if by_rows and holder.is_apart else holder

    return {name: place(name, holder) for name, holder in holdings.items()}
