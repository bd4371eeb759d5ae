"""Resolve a plan: list every edge where placements disagree, with owner, lowering, bytes and reason.

An edge belongs to the variable whose update it reaches along values of that variable's shape; every other edge (losses,
norms, batch statistics) belongs to the step.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.variable_uses import declared_trained
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.control_flow import before_loops, unconditional_nodes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import descendants, grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse, process_of
from autograph_rewrite.ir.types.opdefs import SHARD_ALIKE, is_over
from autograph_rewrite.ir.types.placement import REPLICA
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact, Shape
from autograph_rewrite.ops.facts.symbolic_dims import is_local, rows_of_unit, rows_per_example, shards_of, to_global
from autograph_rewrite.ops.rules import random
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.traits import ENTERS, has
from autograph_rewrite.plan.parts import collective_keys
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import OUTPUT, SIZES, STEP, EdgePlan, Options
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import compression, wire_types
from autograph_rewrite.resolve.batch import measured_input
from autograph_rewrite.resolve.buckets import assign_buckets
from autograph_rewrite.resolve.model_axis import logical_devices
from autograph_rewrite.resolve.server_region import find_server_region
from autograph_rewrite.resolve.stages.assignment import stages_of_each
from autograph_rewrite.resolve.wire_types import as_sent, can_be_sent, can_gather_collectively, sent_bytes
from autograph_rewrite.training_graph import Variable


def resolve_edges(
    plan: Plan,
    state: Propagation,
    outputs: Sequence[Value],
    variables: Mapping[str, Variable],
    sizes: Sizes,
    *,
    padded: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """Return the plan with every reshard edge of the graph.

    Args:
        outputs: values that are read whole outside of the graph.
        sizes: numbers for the symbols of shapes, for the bytes of each edge.
        padded: by the name of an output, dimensions that may be longer in another process.
    """
    edges = _Edges(plan, state, Owners(state, variables), sizes)
    if len(plan.processes) > 1:
        edges.add_of_job()
    for node in state.order:
        edges.add_of_node(node)
    for value in outputs:
        if edges.is_spread(value):
            edges.add(value, "replicated", OUTPUT)
    edges.pad(padded)
    if plan.local_sgd is not None and any(variable.captured for variable in variables.values()):
        edges.drop_unread_sizes()
    found = homed(plan, state, _without_statistics(state, edges.found), variables)
    found = compression.choose(plan, state, found, variables)
    found = _on_logical_devices(plan, state, outputs, found)
    bucketed = assign_buckets(plan, state, found, variables)
    if plan.homes or any(variable.captured for variable in variables.values()):
        bucketed = choose(plan, bucketed, lambda edge: _can_be_gathered(state, edge))
    bucketed = [replace(edge, bytes=-(-edge.bytes // plan.period_of(edge))) for edge in bucketed]
    listed = compression.with_rounds(bucketed, state, variables)
    keyed = collective_keys.with_keys(listed, plan.members)
    return replace(plan.with_edges(keyed), batch=sizes.batch)


@dataclass
class _Edges:
    """The edges found so far, by value and target."""

    plan: Plan
    state: Propagation
    owners: Owners
    sizes: Sizes
    found: dict[tuple[str, str], EdgePlan] = field(default_factory=dict)

    @cached_property
    def late(self) -> set[Node]:
        """The nodes that need a variable: all others are counted once, before any micro-batch begins."""
        return late_nodes(self.state.order)

    def is_spread(self, value: Value) -> bool:
        """Return whether no replica holds the whole value; a process of a job has only a part of the batch."""
        if value in self.state.whole_inputs:
            return len(self.plan.processes) > 1
        return self.state.source(value).placement.differs

    def add(self, value: Value, target: str, reason: str) -> None:
        """Add the edge that converts a value to another placement, and the edges that it needs."""
        state = self.state
        if target == repr(REPLICATED) and value.node.op in ENTERS and self.is_spread(value):
            value = before_loops(value)
            if not self.is_spread(value):
                return
        if (value.name, target) in self.found:
            return
        is_cut = value in state.whole_inputs and target == f"split({state.whole_inputs[value]})"
        if target != "replicated" and self.is_spread(value) and not is_cut:
            self.add(value, "replicated", reason)
        edge = self._edge(value, target, reason)
        if edge.lowering == "micro_reduce" and value.node not in self.late:
            edge = replace(edge, lowering=by_hosts(self.plan, state.source(value)))
        if edge.lowering == "host_gather" and not self.plan.homes:
            if value.dtype == dtypes.STRING:
                self.found.setdefault((value.name, SIZES), _sizes_edge(value, "rows and bytes of texts are counted", 2))
            elif not _knows_rows(state, value):
                self.found[value.name, SIZES] = _sizes_edge(value, "the rows of each process are counted")
        self.found[value.name, target] = edge

    def add_of_job(self) -> None:
        """Add the edges of every step between processes: the number of examples of each, and unseeded draws."""
        state = self.state
        measured = measured_input(state)
        is_open = state.semantics.extent.units is None
        reason = "each process is given a part of any size" if is_open else "what all are given is compared"
        self.found[measured.name, SIZES] = _sizes_edge(measured, reason, 1 + DIGEST)
        for value in fresh_draws(state):
            self.found[value.name, "replicated"] = _draw_edge(value, sent_bytes(state, value, self.sizes))

    def add_of_node(self, node: Node) -> None:
        """Add the edges of a node's operands."""
        state = self.state
        operand_reshards = state.transfers[node].operand_reshards
        if is_over(node, REPLICA):
            self.add_asked(node, operand_reshards.get(0))
            return
        for index, value in enumerate(node.inputs[:1] if node.op == SHARD_ALIKE else node.inputs):
            reshard = operand_reshards.get(index)
            reason = f"{node.op} '{node.name}' reads it"
            if reshard is None:
                if value in state.whole_inputs:
                    self.add(value, f"split({state.whole_inputs[value]})", reason)
                elif value in state.reduced and state.source(value).placement.differs:
                    self.add(value, "replicated", reason)
            elif isinstance(reshard, LocalEntry):
                self.add(value, "local", reason)
            elif isinstance(reshard, Slice):
                self.add(value, f"split({reshard.dim})", reason)
            elif reshard == PARTIAL:
                self.add(value, "partial(sum)", reason)
            elif self.is_spread(value):
                self.add(value, "replicated", reason)

    def add_asked(self, node: Node, reshard: Reshard | None) -> None:
        """Add the edge of a conversion that a pass inserted, under the name of its result."""
        value, made, state = node.inputs[0], node.output(), self.state
        reader = next((use.node for use in made.uses), None)
        reason = f"{reader.op} '{reader.name}' reads it" if reader is not None else OUTPUT
        if reshard is None:
            if value in state.reduced and state.source(value).placement.differs:
                self.add(value, "replicated", reason)
            return
        if not isinstance(reshard, Slice):
            if self.is_spread(value):
                edge = self._edge(value, "replicated", reason)
                owner = self.owners.read_by(value) or edge.owner
                self.found[made.name, "replicated"] = replace(edge, value=made.name, owner=owner)
            return
        target, scatters = f"split({reshard.dim})", is_scattered(self.plan, state, value)
        if self.is_spread(value) and not scatters:
            self.add(value, "replicated", reason)
        owner = self.owners.of(value)
        edge = replace(self._edge(value, target, reason), value=made.name, owner=owner)
        whole = replace(edge, from_=repr(REPLICATED))
        self.found[made.name, target] = replace(edge, lowering="reduce_scatter") if scatters else whole

    def pad(self, padded: Mapping[str, tuple[int, ...]]) -> None:
        """Let processes exchange the lengths of outputs before they gather them."""
        for name, dims in padded.items():
            edge = self.found[name, repr(REPLICATED)]
            value = self.state.graph.value(name)
            rank = self.state.source(value).rank or 0
            self.found[name, SIZES] = _sizes_edge(value, "outputs are padded to the longest", rank)
            self.found[name, repr(REPLICATED)] = replace(edge, lowering="host_gather", padded=dims)

    def drop_unread_sizes(self) -> None:
        """Drop the exchange of the sizes of parts where no gather or global size needs them.

        Sessions keep it: TensorFlow numbers the runs of a session with collectives by asking worker 0, which may be a
        run ahead where runs do not meet.
        """
        if not any(edge.lowered.does(Operation.GATHER) or edge.to == "local" for edge in self.found.values()):
            self.found.pop((measured_input(self.state).name, SIZES), None)

    def _edge(self, value: Value, target: str, reason: str) -> EdgePlan:
        plan, state = self.plan, self.state
        fact = state.source(value)
        owner = self.owners.of(value) if target == "replicated" and not fact.is_local else STEP
        placement = "replicated" if value in state.whole_inputs else repr(fact.placement)
        lowering = lowering_of(plan, fact, target, plan.options_of(owner))
        if value in state.whole_inputs and len(plan.processes) > 1:
            placement = f"split({state.whole_inputs[value]})"
            lowering = "host_gather" if target == "replicated" else lowering
        return EdgePlan(
            value=value.name,
            from_=placement,
            to=target,
            owner=owner,
            lowering=lowering,
            dtype=dtypes.dtype_name(fact.dtype),
            bytes=sent_bytes(state, value, self.sizes),
            reason=reason,
        )


def is_scattered(plan: Plan, state: Propagation, value: Value) -> bool:
    """Return whether each replica makes only its shard of a sum (a reduce-scatter)."""
    fact = state.source(value)
    is_read_whole = value in state.graph.anchors.values() or plan.compresses
    return (fact.placement == PARTIAL and _reads_peers(plan) and not is_read_whole) and all(
        is_over(use.node, REPLICA) and isinstance(state.transfers[use.node].operand_reshards.get(0), Slice)
        for use in value.uses
    )


def _reads_peers(plan: Plan) -> bool:
    """Return whether devices read each other's memory: those of one process, whose shards may be along any axis."""
    return len(plan.processes) == 1


def _on_logical_devices(
    plan: Plan, state: Propagation, outputs: Sequence[Value], found: Mapping[tuple[str, str], EdgePlan]
) -> dict[tuple[str, str], EdgePlan]:
    """Return the edges, each with the number of the device of a replica that has its value."""
    logical = logical_devices(state.order) if plan.model is not None else {}
    stages: Mapping[Node, int] = {}
    if plan.pipeline is not None and plan.mode == "mirrored":  # else there are no collectives
        stages = stages_of_each(plan.with_edges(tuple(found.values())), state, outputs)

    def device(edge: EdgePlan) -> int:
        node = state.graph.value(edge.value).node
        return plan.place(stages.get(node, 0)) + logical.get(node, 0)

    return (
        {key: replace(edge, logical=device(edge)) for key, edge in found.items()} if logical or stages else dict(found)
    )


def _can_be_gathered(state: Propagation, edge: EdgePlan) -> bool:
    """Return whether a collective can gather the parts of replicas: their shape is the same in all steps."""
    fact = state.source(state.graph.value(edge.value))
    return fact.dtype != dtypes.BFLOAT16 and not wire_types.may_change(fact)


def fresh_draws(state: Propagation) -> list[Value]:
    """Return the random values that differ from process to process: those drawn whole, without any seed."""
    nodes = (node for node in state.order if node.op in random.RULES and is_pinned(node))
    unseeded = [node for node in nodes if node.attr("seed", None) == 0 == node.attr("seed2", None)]
    values = [node.output(i) for node in unseeded for i in range(len(state.transfers[node].outputs))]
    return [value for value in values if not state.source(value).placement.differs]


def _draw_edge(value: Value, nbytes: int) -> EdgePlan:
    reason = "drawn without a seed: all processes take what the first one drew"
    dtype = dtypes.dtype_name(value.dtype)
    return EdgePlan(
        value.name, "single", "replicated", lowering="host_reduce", dtype=dtype, bytes=nbytes, reason=reason
    )


def _sizes_edge(value: Value, reason: str, numbers: int = 1) -> EdgePlan:
    return EdgePlan(value.name, "local", SIZES, lowering="host_reduce", dtype="int32", bytes=4 * numbers, reason=reason)


def _knows_rows(state: Propagation, value: Value) -> bool:
    """Return whether the rows of a split value follow from the number of examples."""
    return value in state.whole_inputs or rows_per_example(state.source(value).split_size) is not None


def _without_statistics(state: Propagation, found: dict[tuple[str, str], EdgePlan]) -> dict[tuple[str, str], EdgePlan]:
    """Give statistics to the step: a variable's gradient may depend on a statistic of the same shape.

    The mean of a batch normalisation reaches the update of its scale, but through the gradient of the scale.
    """
    owned = ((key, edge) for key, edge in found.items() if edge.owner != STEP and edge.from_.startswith("partial"))
    result = dict(found)
    for several in grouped((edge.owner, key) for key, edge in owned).values():
        nodes = {key: state.graph.value(key[0]).node for key in several}
        for key in several if len(several) > 1 else ():
            made = descendants([nodes[key]], controls=False)
            if any(nodes[other] in made for other in several if other != key):
                result[key] = replace(found[key], owner=STEP)
    return result


# Lowering of an edge: the row of the table that fits its placements, its devices and its owner's residence.
#
#     partial(sum), one process       collective_reduce, or add_n where one copy of a variable serves all
#     partial(sum), processes         host_reduce: added up in each process, then among processes
#     the same with `hint: ring`, or GPUs   collective_reduce: one ring of all; on GPUs its way through a host is NCCL's
#     partial(sum), for a server      accumulator; for all workers host_reduce, but where they are servers themselves
#
# Hierarchical sums: Goyal et al., Accurate, Large Minibatch SGD (2017), section 4.


ACCUMULATED = frozenset((dtypes.HALF, dtypes.FLOAT, dtypes.DOUBLE))
"""The types of conditional accumulators: TensorFlow has no kernel for others."""


def homed(
    plan: Plan,
    state: Propagation,
    found: Mapping[tuple[str, str], EdgePlan],
    variables: Mapping[str, Variable],
) -> dict[tuple[str, str], EdgePlan]:
    """Return the edges with their lowerings for variables that live on single devices (`plan.homes`).

    Args:
        found: the edges, by value and target.
    """
    if not plan.homes:
        return dict(found)
    if len(plan.processes) == 1:
        return {key: replace(edge, lowering=_at_home(plan, state, edge)) for key, edge in found.items()}
    through = {key: replace(edge, lowering=_through_servers(plan, state, edge)) for key, edge in found.items()}
    if not _can_meet_besides(plan) or _reaches_branches(plan.with_edges(through.values()), state, variables):
        return through
    besides = {key: edge for key, edge in found.items() if _is_for_workers(plan, state, edge)}
    return through | besides if _are_worth_a_ring(plan, besides.values()) else through


def _can_meet_besides(plan: Plan) -> bool:
    """Return whether collectives can carry the values that no server takes, in a job whose workers wait for each other.

    Runs with collectives have one number in all processes (`runtime.engine.staleness_clock`). A process identifies a
    sent value by this number, the devices at both ends and the name of a node, which is the same in the graphs of all
    workers: values between two servers, or two devices of one, would be mixed up. Where the server is a worker, the
    first worker to finish would end the run of that worker.
    """
    servers = set(plan.homes.values())
    apart = len(servers) == 1 and {process_of(device) for device in servers}.isdisjoint(plan.processes)
    return apart and not plan.is_asynchronous and all(parse(server).kind == "CPU" for server in servers)


def _are_worth_a_ring(plan: Plan, edges: Collection[EdgePlan]) -> bool:
    """Return whether sums take no longer around a ring of n workers than through a server.

    The ring sends 2 (n - 1) messages one after another, each with a share of the bytes; a server takes two, with all
    bytes of each worker. Small sums of few workers are one-shot, which takes one message.
    """
    return len(plan.processes) <= 2 or may_be(plan) or sum(edge.bytes for edge in edges) > SENT_MORE


def _reaches_branches(plan: Plan, state: Propagation, variables: Mapping[str, Variable]) -> bool:
    """Return whether processes send values to each other in a loop or branch.

    A run may end before a value arrives that was sent to a branch that is not taken: nothing in the run waits for it.
    """
    sometimes = set(state.order) - unconditional_nodes(state.order)
    if not sometimes:
        return False
    region = find_server_region(plan, state, variables)
    copied = {variables[request.name].handle for request in plan.variables if request.server and request.server.proxy}

    def is_there(value: Value) -> bool:
        handle = handle_node(value)
        return (handle in region.handles and handle.name not in copied) or value.node in region.nodes

    return any(node in region.nodes or any(map(is_there, node.inputs)) for node in sometimes)


def _is_for_workers(plan: Plan, state: Propagation, edge: EdgePlan) -> bool:
    """Return whether an edge is taken by no server, and is a sum or a gather that collectives can carry."""
    if edge.owner in plan.homes:
        return False
    if edge.to == SIZES or not edge.lowered.does(Operation.REDUCE):
        return edge.lowering != "host_gather"  # its rows may be strings, in any number
    fact = as_sent(state.source(state.graph.value(edge.value)))
    return can_be_sent(fact.dtype, fact.placement.op)


def _at_home(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return the lowering that combines values on the device of their owner, where one process has all replicas."""
    placement = state.source(state.graph.value(edge.value)).placement
    if edge.owner not in plan.homes or edge.to != repr(REPLICATED):
        return edge.lowering
    if placement.is_split:
        return "concat"
    return ("add_n" if placement == PARTIAL else "fold") if placement.is_partial else edge.lowering


def _through_servers(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return the lowering by which a value crosses between processes through a store on a server."""
    fact = state.source(state.graph.value(edge.value))
    if edge.lowering in ("collective_gather", "host_gather"):
        return "server_gather"
    if edge.lowering not in ("collective_reduce", "micro_reduce", "host_reduce"):
        return edge.lowering
    return "accumulator" if fact.placement == PARTIAL and as_sent(fact).dtype in ACCUMULATED else "server_reduce"


def lowering_of(plan: Plan, fact: Fact, target: str, options: Options) -> str:
    """Return the lowering of an edge where no servers hold variables.

    Args:
        fact: of the value.
        target: the wanted placement, as edges write it.
        options: of the edge's owner.
    """
    if target.startswith("split"):
        return "slice"
    if target.startswith("partial"):
        return "zeros"
    if target == "local":
        return "local_size"
    crosses = len(plan.processes) > 1
    if fact.is_local:
        counted = any(rows_of_unit(entry) is None for entry in fact.value or () if is_local(entry))
        return "host_reduce" if crosses and counted else "global_size"
    mirrored = plan.mode == "mirrored" and plan.replicas > 1
    if fact.placement.is_partial:
        wire = wire_types.wire_type(fact.dtype, fact.placement.op)
        if mirrored and wire in wire_types.COLLECTIVE_TYPES and not _is_hierarchical(plan, options):
            return "micro_reduce" if plan.microbatches > 1 else "collective_reduce"
        return by_hosts(plan, fact)
    if plan.replicas > 1 and _gathers_shards(plan, fact):
        return "all_gather"
    if (
        mirrored
        and (plan.microbatches == 1 or shards_of(fact.split_size))
        and can_gather_collectively(fact, rows_of_unit(fact.split_size), plan.devices)
    ):
        return "collective_gather"
    return "host_gather" if crosses else "concat"


def _gathers_shards(plan: Plan, fact: Fact) -> bool:
    return bool(shards_of(fact.split_size)) and _reads_peers(plan)


def _is_hierarchical(plan: Plan, options: Options) -> bool:
    """Return whether replicas of a process add up by themselves before processes do.

    Among CPU devices of one memory an AddN moves less than a ring of them all, and the ring among processes is shorter
    (measured: benchmarks/hierarchy.py). NCCL knows the links between GPUs better. A hint for a ring is followed. Error
    feedback of compressors is per replica, so each replica has to send.
    """
    several = len(plan.processes) > 1 and plan.replicas_each > 1 and options.hint == "auto"
    return several and options.compressor == NONE and all(parse(device).kind == "CPU" for device in plan.devices)


def by_hosts(plan: Plan, fact: Fact) -> str:
    """Return the lowering that combines the parts of a value on the first device of each process."""
    if len(plan.processes) > 1:
        return "host_reduce"
    return "add_n" if fact.placement == PARTIAL else "fold"


# Owners of edges: the variable whose update an edge reaches along values of that variable's shape; else the step.
#
# dw: partial(sum) ──► sum ──► ResourceApplyAdam(w)      belongs to w
# loss: partial(sum) ──► sum ──► output                  belongs to the step


MIXES_ROWS = families("contraction", "convolutions", "layers", "normalization", "pooling", "recurrent", "reduce")
"""Families of rules that the rows of a sparse gradient never pass: rows that do were gathered in the forward pass."""
MAX_REACH = 400
"""How many nodes to search for the owner of an edge."""


class Owners:
    """Finds the variable that an edge serves."""

    def __init__(self, state: Propagation, variables: Mapping[str, Variable]) -> None:
        self._state = state
        self._by_handle = {variable.handle: variable for variable in variables.values()}
        self._trained = declared_trained(variables)

    def of(self, value: Value) -> str:
        """Return the owner of the reduction or gather of `value`."""
        fact = self._state.source(value)
        sparse = fact.placement.is_split
        if not sparse and not fact.shape:
            return STEP if fact.shape == () and not self._scalar_variables() else self._search(value, fact.shape, False)
        return self._search(value, fact.shape, sparse)

    def read_by(self, value: Value) -> str | None:
        """Return the name of the variable that a value is read from, None where it is read from none."""
        node = value.node
        found = self._by_handle.get(handle_node(node.inputs[0]).name) if has(node.op, "reads_whole") else None
        return None if found is None else found.name

    def _scalar_variables(self) -> bool:
        return any(variable.shape == () and variable.trainable is not False for variable in self._by_handle.values())

    def _search(self, value: Value, shape: Shape | None, sparse: bool) -> str:
        reached: list[Variable] = []
        seen = {value}
        pending = deque([value])
        visited = 0
        while pending and visited < MAX_REACH:
            current = pending.popleft()
            for node, index in current._uses:
                visited += 1
                variable = self._updated_by(node)
                if variable is not None:
                    reached.append(variable)
                    # A slot is written first, then read again for the update of its variable.
                    pending.extend(read for read in self._reads(node.inputs[0]) if read not in seen)
                    seen.update(self._reads(node.inputs[0]))
                    continue
                if sparse and (_mixes_rows(node) or has(node.op, "measures")):  # the number of rows is no gradient
                    continue
                for other in [node.output(index)] if node.op == "IdentityN" else self._made(node):
                    if other not in seen and self._follows(other, shape, sparse):
                        seen.add(other)
                        pending.append(other)
        alike = [v for v in reached if v.shape == shape] or reached
        owners = [v for v in alike if v.name in self._trained] if self._trained else alike
        return next((v.name for v in owners), STEP)

    def _updated_by(self, node: Node) -> Variable | None:
        if not is_update(node):
            return None
        return self._by_handle.get(handle_node(node.inputs[0]).name)

    def _reads(self, handle: Value) -> list[Value]:
        """Return the values that are read from a variable, also inside branches and loops."""
        uses = handle_uses(handle_node(handle))
        return [node.output() for node, _ in uses if node.op == "ReadVariableOp"]

    def _made(self, node: Node) -> list[Value]:
        transferred = self._state.transfers.get(node)
        return [] if transferred is None else [node.output(i) for i in range(len(transferred.outputs))]

    def _follows(self, value: Value, shape: Shape | None, sparse: bool) -> bool:
        fact = self._state.facts[value]
        if sparse:  # rows: their number changes when duplicates are merged
            return fact.shape is None or len(fact.shape) >= 1
        if fact.shape is None or shape is None:
            return True
        mine = tuple(to_global(dim, None) if shards_of(dim) else dim for dim in fact.shape)
        return mine == shape or _elements(mine) == _elements(shape)


def _mixes_rows(node: Node) -> bool:
    return family_of(node.op) in MIXES_ROWS


def _elements(shape: Shape) -> int | None:
    if any(not isinstance(dim, int) or is_local(dim) for dim in shape):
        return None
    return math.prod(dim for dim in shape if isinstance(dim, int))


# One-shot sums: the all-reduces between processes in which each member sends all to all others, instead of a ring.
#
#     ring       2 (n - 1) messages of bytes / n, one after another
#     one-shot     (n - 1) messages of bytes; each member adds up what it has got, in the same order as all others
#
# A message between two processes costs TensorFlow's gRPC about half a millisecond of processor time, whatever it holds
# (benchmarks/one_shot.py). Two members send as many bytes in either way. One-shot sums are used in functions, and where
# the runs of a session end together (`runtime.engine.staleness_clock.finish_together`): else a process that ends a run
# deletes values that another has not asked for yet, and a gather ends before a ring does.
#
# After: XLA's one-shot and two-shot all-reduce; Thakur et al., Optimization of Collective Communication Operations in
# MPICH (2005), section 4.5.


INSTEAD = MappingProxyType(
    {"collective_reduce": "one_shot_reduce", "host_reduce": "host_one_shot", "micro_reduce": "micro_one_shot"}
)
"""By lowering with a ring, the one-shot lowering with the same result."""
MOST_MEMBERS = 8
GATHERED = 1024 * 1024
"""Most bytes of all members together: more does not fit into the caches of the core that adds them up."""
SENT_MORE = 48 * 1024
"""Most extra bytes of a one-shot's message over a ring's: at 1 Gbit/s they take as long as one more message."""


def choose(plan: Plan, edges: Iterable[EdgePlan], fits: Callable[[EdgePlan], bool]) -> list[EdgePlan]:
    """Return the edges, with small sums between processes as one-shot sums.

    Args:
        edges: with their buckets.
        fits: tells whether the shape of an edge's value is the same in all steps, and a gather knows its type.
    """
    listed = list(edges)
    members = len(plan.processes)
    if not may_be(plan):
        return listed
    rings = [edge for edge in listed if _is_ring(plan, edge) and (edge.to == SIZES or fits(edge))]
    together = Counter[int]()
    for edge in rings:
        together[edge.bucket] += edge.bytes
    whole = Counter(edge.bucket for edge in listed if edge.bucket)
    found = Counter(edge.bucket for edge in rings if edge.bucket)

    def is_small(edge: EdgePlan) -> bool:
        sent = together[edge.bucket] if edge.bucket else edge.bytes
        return 0 < sent * members <= GATHERED and sent - 2 * sent / members <= SENT_MORE

    chosen = {id(edge) for edge in rings if is_small(edge) and whole[edge.bucket] == found[edge.bucket]}
    return [replace(edge, lowering=INSTEAD[edge.lowering]) if id(edge) in chosen else edge for edge in listed]


def may_be(plan: Plan) -> bool:
    """Return whether small sums of a job can be one-shot."""
    on_cpu = all(parse(device).kind == "CPU" for device in plan.devices)
    return 1 < len(plan.processes) <= MOST_MEMBERS and on_cpu and plan.model is None


def _is_ring(plan: Plan, edge: EdgePlan) -> bool:
    """Return whether a ring between processes, which no hint asks for, carries an edge's values uncompressed."""
    if edge.lowering not in INSTEAD or edge.compressor != NONE or plan.options_of(edge.owner).hint != "auto":
        return False
    return edge.lowered.crosses or plan.replicas_each == 1
