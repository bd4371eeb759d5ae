"""Resolve a plan: list every edge where placements disagree, with owner, lowering, bytes and reason.

An edge belongs to the variable whose update it reaches along values of that variable's shape; every other edge (losses,
norms, batch statistics) belongs to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.analysis.facts.concrete_sizes import Sizes
from autograph_rewrite.analysis.facts.placement import PARTIAL, REPLICATED
from autograph_rewrite.analysis.facts.symbolic_dims import rows_per_example
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.rules.arrays import random
from autograph_rewrite.analysis.rules.base import LocalEntry, Slice
from autograph_rewrite.ir.control_flow import before_loops
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import ENTERS
from autograph_rewrite.plan.parts import collective_keys
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import OUTPUT, SIZES, STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import compression, wire_types
from autograph_rewrite.resolve.batch.batch_inputs import measured_input
from autograph_rewrite.resolve.buckets import assign_buckets
from autograph_rewrite.resolve.edges import one_shot
from autograph_rewrite.resolve.edges.lowering_choice import by_hosts, homed, lowering_of
from autograph_rewrite.resolve.edges.owners import Owners
from autograph_rewrite.resolve.model_axis.logical_devices import logical_devices
from autograph_rewrite.resolve.wire_types import sent_bytes
from autograph_rewrite.training_graph import Variable


def resolve_edges(
    plan: Plan,
    state: Propagation,
    outputs: Iterable[Value],
    variables: Mapping[str, Variable],
    sizes: Sizes,
    *,
    padded: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """Return the plan with every reshard edge of the graph.

    Args:
        plan: the request.
        state: the placements.
        outputs: values that the outside reads whole.
        variables: of the item.
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
    found = _on_logical_devices(plan, state, found)
    bucketed = assign_buckets(plan, state, found, variables)
    if plan.homes or any(variable.captured for variable in variables.values()):
        bucketed = one_shot.choose(plan, bucketed, lambda edge: _can_be_gathered(state, edge))
    bucketed = [replace(edge, bytes=-(-edge.bytes // plan.period_of(edge))) for edge in bucketed]
    listed = compression.with_rounds(bucketed, state, variables)
    keyed = collective_keys.with_keys(listed, plan.devices, plan.members)
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
        """The nodes that need a variable: what does not is counted once, before any micro-batch begins."""
        return late_nodes(self.state.order)

    def is_spread(self, value: Value) -> bool:
        """Return whether no replica holds the whole value; each process is given a part of the batch only."""
        if value in self.state.whole_inputs:
            return len(self.plan.processes) > 1
        return self.state.source(value).placement.differs

    def add(self, value: Value, target: str, reason: str) -> None:
        """Add the edge that gives a value in another placement, and those that it needs itself."""
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
        """Add what several processes tell each other in any step: how many examples each has, and unseeded draws."""
        state = self.state
        measured = measured_input(state)
        is_open = state.semantics.batch is None
        reason = "each process is given a part of any size" if is_open else "what all are given is compared"
        self.found[measured.name, SIZES] = _sizes_edge(measured, reason, 1 + DIGEST)
        for value in fresh_draws(state):
            self.found[value.name, "replicated"] = _draw_edge(value, sent_bytes(state, value, self.sizes))

    def add_of_node(self, node: Node) -> None:
        """Add the edges of what a node reads."""
        state = self.state
        operand_reshards = state.transfers[node].operand_reshards
        for index, value in enumerate(node.inputs):
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

    def pad(self, padded: Mapping[str, tuple[int, ...]]) -> None:
        """Let processes tell each other how long outputs are, before they gather them."""
        for name, dims in padded.items():
            edge = self.found[name, repr(REPLICATED)]
            value = self.state.graph.value(name)
            rank = self.state.source(value).rank or 0
            self.found[name, SIZES] = _sizes_edge(value, "outputs are padded to the longest", rank)
            self.found[name, repr(REPLICATED)] = replace(edge, lowering="host_gather", padded=dims)

    def drop_unread_sizes(self) -> None:
        """Let processes keep the sizes of their parts to themselves where nothing is joined that is made of them.

        Those of sessions go on telling each other: TensorFlow numbers the runs of a session with collectives by asking
        worker 0, which may be a run ahead where runs do not meet.
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


def _on_logical_devices(
    plan: Plan, state: Propagation, found: Mapping[tuple[str, str], EdgePlan]
) -> dict[tuple[str, str], EdgePlan]:
    """Return the edges, each with the logical device that has its value."""
    if plan.model is None:
        return dict(found)
    logical, graph = logical_devices(state.order), state.graph
    return {key: replace(edge, logical=logical.get(graph.value(edge.value).node, 0)) for key, edge in found.items()}


def _can_be_gathered(state: Propagation, edge: EdgePlan) -> bool:
    """Return whether a collective can gather what replicas hold, in one shape for all steps."""
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
    """Give the step what is no gradient: a variable's gradient may depend on a statistic of the same shape.

    The mean of a batch normalisation reaches the update of its scale, but through the gradient of the scale.
    """
    by_owner: dict[str, list[tuple[str, str]]] = {}
    for key, edge in found.items():
        if edge.owner != STEP and edge.from_.startswith("partial"):
            by_owner.setdefault(edge.owner, []).append(key)
    result = dict(found)
    for several in by_owner.values():
        nodes = {key: state.graph.value(key[0]).node for key in several}
        for key in several if len(several) > 1 else ():
            made = descendants([nodes[key]], controls=False)
            if any(nodes[other] in made for other in several if other != key):
                result[key] = replace(found[key], owner=STEP)
    return result
