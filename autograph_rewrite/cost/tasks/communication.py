"""Make the communication tasks: a chain of tasks on links for each reshard edge or bucket of edges.

collective_reduce   ring                    host_reduce   AddN in the process ─► ring among processes
one_shot_reduce     all-gather, then AddN
add_n, concat       an op on the first device             (accelerators: after moving the others' values there)
to a server         AddN in the process ─► push to the server of each shard ─► AddN there
over the replicas   reduce-scatter: half a ring           (stage 1: a whole one)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autograph_rewrite.analysis.op_work import Work
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.codecs.codec import Codec, Price, kept_back
from autograph_rewrite.cost.hardware.topology import Holding, LinkTransfer, Topology
from autograph_rewrite.cost.tasks.step import AnalyzedStep
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Task, compute_seconds, on_cores
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.mesh import REPLICA
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.plan.codecs import codec_of
from autograph_rewrite.plan.parts.lowerings import ACROSS, ONE_SHOT, STORES, Hop, Medium, Operation
from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import shape_of
from autograph_rewrite.resolve.wire_types import sent_bytes


@dataclass(frozen=True)
class Member:
    """One value that is exchanged.

    Attributes:
        value: in the folded graph.
        sent: the bytes that one replica hands over.
        whole: the bytes of the value on one replica.
        result: the bytes of the result.
        kept: the bytes of a codec's state, besides the residual.
    """

    edge: EdgePlan
    value: Value
    sent: int
    whole: int
    result: int
    kept: int = 0

    @property
    def codec(self) -> Codec | None:
        """The codec that encodes it; None for a second exchange, which has a role."""
        return None if self.edge.compressor == NONE or self.edge.role else codec_of(self.edge.compressor)


@dataclass(frozen=True)
class ExchangeGroup:
    """Values that are exchanged together.

    Attributes:
        members: at least one.
        holder: who holds the variable whose update reads them, if that is not every replica.
    """

    members: tuple[Member, ...]
    holder: Holding | None = None

    @property
    def first(self) -> EdgePlan:
        """The first edge, whose lowering all share."""
        return self.members[0].edge

    @property
    def sent(self) -> int:
        """The bytes that one replica hands over."""
        return sum(member.sent for member in self.members)

    @property
    def name(self) -> str:
        """The name in a trace."""
        more = f" and {len(self.members) - 1} more" if len(self.members) > 1 else ""
        return f"{self.kind} {self.first.value}{more}"

    @property
    def kind(self) -> str:
        """The lowering, or "push" and "reduce_scatter" for variables on servers and in shards of replicas."""
        if self.holder is not None and self.holder.is_apart:
            return "push"
        if self.holder is not None and self.holder.scatters:
            return "reduce_scatter"
        return self.first.lowering

    @property
    def handed_over(self) -> int:
        """The bytes of a sum that worker 0 hands to each other worker."""
        return self.sent if self.first.lowered.is_stored and self.holder is None else 0

    @property
    def residual(self) -> int:
        """The bytes that error feedback keeps on each replica between steps, with the codec's state."""
        kept = [one for one in self.members if one.codec is not None and one.codec.error_feedback]
        return sum(one.whole + one.kept for one in kept)

    @property
    def scratch(self) -> int:
        """The bytes that encoding needs on each replica during the exchange."""
        made = [(one, one.codec.price) for one in self.members if one.codec is not None]
        return sum(int(one.whole * price.memory) + 3 * one.kept for one, price in made)

    @property
    def is_everywhere(self) -> bool:
        """Whether every replica gets the result, and not only the first device of each process."""
        return self.first.lowered.is_everywhere


def groups(
    folded: AnalyzedStep, edges: Sequence[EdgePlan], held: dict[str, Holding], sizes: Sizes
) -> list[ExchangeGroup]:
    """Return the exchanges of a step, those of a bucket together."""
    step = set(folded.order)
    found: list[list[Member]] = []
    buckets: dict[int, list[Member]] = {}
    for edge in edges:
        if not edge.lowered.hops or edge.node not in folded.state.graph:
            continue
        value = folded.state.graph.value(edge.value)
        if value.node not in step:
            continue
        holder, members = held.get(edge.owner), list[Member]()
        if edge.bucket and (holder is None or not holder.homes):
            members = buckets.setdefault(edge.bucket, members)
        if not members:
            found.append(members)
        members.append(_member(edge, value, folded, sizes))
    return [ExchangeGroup(tuple(members), held.get(members[0].edge.owner)) for members in found]


def _member(edge: EdgePlan, value: Value, folded: AnalyzedStep, sizes: Sizes) -> Member:
    state = folded.state
    fact: Fact = state.facts[value] if value in state.whole_inputs else state.source(value)
    whole = sizes.nbytes(fact)
    if edge.to == SIZES:
        return Member(edge, value, edge.bytes, 0, 4)
    if edge.compressor != NONE:
        shape = shape_of(fact, folded.item.variables.get(edge.owner))
        kept = kept_back(shape, wire_types.wire_type(fact.dtype, "sum"), codec_of(edge.compressor))
        return Member(edge, value, edge.bytes, whole, whole, kept)
    sent = sent_bytes(state, value, sizes)
    if not fact.placement.is_split:
        return Member(edge, value, sent, whole, whole)
    return Member(edge, value, sent, whole, whole * sizes.micro * sizes.replicas)


def tasks_of(group: ExchangeGroup, topology: Topology) -> Iterator[Task]:
    """Yield the tasks of a group in order; the caller makes each wait for the one before."""
    edge, nbytes, local = group.first, float(group.sent), topology.local
    holder = group.holder if group.holder is not None and group.holder.is_apart else None
    micro = topology.plan.microbatches
    if micro > 1 and edge.from_.startswith("partial"):
        yield _pass(group, topology, Work("elementwise", 0.0, (micro + 1) * nbytes), local, "accumulate")
    if edge.compressor != NONE:
        price = codec_of(edge.compressor).price
        ops = price.ops if price.ops == 1 else price.ops * len(group.members)
        yield _pass(group, topology, _encoding(group, price), local, "encode", ops)
    elif len(group.members) > 1:
        yield _pass(group, topology, Work("elementwise", 0.0, 4.0 * nbytes), local, "pack")
    hops = edge.lowered.hops
    if (REPLICA in hops[0].over and hops[0].medium is Medium.OPS) or holder is not None:
        yield from _meet_in_process(group, topology, nbytes)
    if holder is not None:
        yield from _push(group, holder, topology, nbytes)
    elif group.kind == "reduce_scatter":
        yield exchange_task(group.name, group.kind, topology.ring_gather(nbytes / topology.plan.replicas))
    else:
        for hop in hops:
            yield from _hop(group, hop, topology, nbytes)


def _hop(group: ExchangeGroup, hop: Hop, topology: Topology, nbytes: float) -> Iterator[Task]:
    """Yield the tasks of one hop between devices; those of ops within a process come from `tasks_of`."""
    between = hop.over == ACROSS
    if hop.medium in STORES:  # values that belong to no variable on a server are pushed to worker 0
        first = topology.plan.hosts[0]
        yield exchange_task(group.name, group.kind, topology.push(nbytes, first))
        yield exchange_task(f"hand over {group.first.value}", "hand_over", topology.pull(group.handed_over, first))
    elif hop.algorithm == ONE_SHOT:
        yield exchange_task(group.name, group.kind, topology.ring_gather(nbytes, hosts=between))
        members = topology.processes if between else topology.plan.replicas
        yield _pass(group, topology, Work("elementwise", 0.0, (members + 1) * nbytes), topology.local, "AddN")
    elif hop.medium is Medium.COLLECTIVE and hop.operation is Operation.REDUCE:
        yield exchange_task(group.name, group.kind, topology.ring_reduce(nbytes, hosts=between))
    elif hop.medium is Medium.COLLECTIVE:
        joined = nbytes * topology.local if between else nbytes
        yield exchange_task(group.name, group.kind, topology.ring_gather(joined, hosts=between))


def exchange_task(name: str, kind: str, exchange: LinkTransfer) -> Task:
    """Return the task of one exchange."""
    return Task(name, EXCHANGE, kind, exchange.holds, exchange.seconds, traffic=exchange.traffic)


def _meet_in_process(group: ExchangeGroup, topology: Topology, nbytes: float) -> Iterator[Task]:
    """Yield the tasks that add up or join the values of one process's replicas on its first device."""
    local = topology.local
    if local == 1:
        return
    moved = topology.within(nbytes * (local - 1))
    if moved.seconds:
        yield exchange_task(group.name, group.kind, moved)
    yield _pass(group, topology, Work("elementwise", 0.0, nbytes * (local + 1)), 1, group.first.lowering)


def _push(group: ExchangeGroup, holder: Holding, topology: Topology, nbytes: float) -> Iterator[Task]:
    """Yield the parallel pushes to the homes of all parts, and the sums there."""
    yield exchange_task(group.name, "push", topology.push(nbytes, *holder.homes))
    work = Work("elementwise", 0.0, nbytes / holder.parts * (topology.processes + 1))
    if topology.processes > 1:
        lanes = dict.fromkeys(topology.compute_lane(home) for home in holder.homes)
        seconds = compute_seconds(work, topology.machine.core) + topology.machine.core.op_seconds
        yield Task(group.name, COMPUTE, "AddN", dict.fromkeys(lanes, seconds), seconds)


def _encoding(group: ExchangeGroup, price: Price) -> Work:
    """Return the work of encoding and decoding on each replica."""
    whole = sum(member.whole for member in group.members)
    if price.sorts:
        return Work("sort", whole / dtypes.width(group.members[0].value.dtype), price.passes * whole)
    return Work("elementwise", 0.0, price.passes * whole)


def _pass(group: ExchangeGroup, topology: Topology, work: Work, instances: int, op: str, ops: int = 1) -> Task:
    """Return the task of ops on the values of a group, on every replica or on the first device."""
    return pass_task(f"{op} {group.first.value}", op, work, instances, topology, ops)


def pass_task(name: str, op: str, work: Work, instances: int, topology: Topology, ops: int = 1) -> Task:
    """Return the task of ops that are not in the folded graph, on every replica of a process or on its first device.

    Args:
        op: its kind in the trace.
        work: FLOPs and bytes of one instance.
        instances: 1, or one per replica.
        ops: how many are launched one after another.
    """
    if topology.on_cpu:
        seconds, width = on_cores(work, instances, topology.machine)
        seconds += (ops - 1) * topology.machine.core.op_seconds
        return Task(name, COMPUTE, op, {topology.lanes[0]: seconds}, seconds, width)
    seconds = compute_seconds(work, topology.machine.accelerator) + topology.machine.accelerator.op_seconds * ops
    lanes = topology.lanes if instances > 1 else topology.lanes[:1]
    return Task(name, COMPUTE, op, dict.fromkeys(lanes, seconds), seconds)
