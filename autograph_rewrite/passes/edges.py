"""Resolve a plan: list every edge where placements disagree, with owner, lowering, bytes and reason.

An edge belongs to the variable whose update it reaches along values of that variable's shape; every other edge (losses,
norms, batch statistics) belongs to the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.dims import is_local, rows_per_example
from autograph_rewrite.analysis.fact import PARTIAL, REPLICATED, Fact, Shape
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.roles import PASSES_HANDLES, handle_of, is_update
from autograph_rewrite.analysis.rules import TABLE, random
from autograph_rewrite.analysis.rules.base import LocalEntry, Slice
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.frames import ENTERS, before_loops
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.walk import descendants
from autograph_rewrite.item import Variable
from autograph_rewrite.passes import combine, compress_choice
from autograph_rewrite.passes.batch import measured_input
from autograph_rewrite.passes.blocks import DIGEST
from autograph_rewrite.passes.buckets import assign_buckets
from autograph_rewrite.passes.gather import can_gather_collectively
from autograph_rewrite.plan import keys
from autograph_rewrite.plan.parts import SIZES, STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan

MEASURES = frozenset(("Shape", "ShapeN", "Size", "Rank"))  # how many rows there are is not the rows
MIXES_ROWS = frozenset(("contract", "neural", "normalisation", "pooling", "recurrent", "reduce"))
"""Families of rules that the rows of a sparse gradient never pass: what does was gathered in the forward pass."""
ACCUMULATED = frozenset((dtypes.HALF, dtypes.FLOAT, dtypes.DOUBLE))
"""The types of conditional accumulators (REQUIREMENTS F-19)."""
MAX_REACH = 400
"""How many nodes to look at for the owner of an edge."""


def resolve(plan: Plan, state: Propagation, outputs: Iterable[Value], variables: Mapping[str, Variable]) -> Plan:
    """Return the plan with every reshard edge of the graph.

    Args:
        plan: the request.
        state: the placements.
        outputs: values that the outside reads whole.
        variables: of the item.
    """
    found: dict[tuple[str, str], EdgePlan] = {}
    owners = Owners(state, variables)

    def is_spread(value: Value) -> bool:
        """Return whether no replica holds the whole value; each process is given a part of the batch only."""
        if value in state.whole_inputs:
            return len(plan.processes) > 1
        return state.source(value).placement.differs

    def need(value: Value, target: str, reason: str) -> None:
        if target == repr(REPLICATED) and value.node.op in ENTERS and is_spread(value):
            value = before_loops(value)
            if not is_spread(value):
                return
        if (value.name, target) in found:
            return
        is_cut = value in state.whole_inputs and target == f"split({state.whole_inputs[value]})"
        if target != "replicated" and is_spread(value) and not is_cut:
            need(value, "replicated", reason)
        edge = _edge(plan, state, owners, value, target, reason)
        if edge.lowering == "host_gather" and not plan.homes and not _knows_rows(state, value):
            found[value.name, SIZES] = _sizes_edge(value, "the rows of each process are counted")
        found[value.name, target] = edge

    if len(plan.processes) > 1:
        measured = measured_input(state)
        is_open = state.semantics.batch is None
        reason = "each process is given a part of any size" if is_open else "what all are given is compared"
        found[measured.name, SIZES] = _sizes_edge(measured, reason, 1 + DIGEST)
        for value in fresh_draws(state):
            found[value.name, "replicated"] = _draw_edge(value)
    for node in state.order:
        wants = state.answers[node].wants
        for index, value in enumerate(node.inputs):
            want = wants.get(index)
            reason = f"{node.op} '{node.name}' reads it"
            if want is None:
                if value in state.whole_inputs:
                    need(value, f"split({state.whole_inputs[value]})", reason)
                elif value in state.reduced and state.source(value).placement.differs:
                    need(value, "replicated", reason)
                continue
            if isinstance(want, LocalEntry):
                need(value, "local", reason)
            elif isinstance(want, Slice):
                need(value, f"split({want.dim})", reason)
            elif want == PARTIAL:
                need(value, "partial(sum)", reason)
            elif is_spread(value):
                need(value, "replicated", reason)
    for value in outputs:
        if is_spread(value):
            need(value, "replicated", "it is an output")
    found = _homed(plan, state, _without_statistics(state, found))
    found = compress_choice.choose(plan, state, found, variables)
    listed = compress_choice.with_factors(assign_buckets(plan, state, found), state, variables)
    return plan.with_edges(keys.with_keys(listed, plan.devices, plan.hosts))


def fresh_draws(state: Propagation) -> list[Value]:
    """Return the random values that differ from process to process: those drawn whole, without any seed."""
    nodes = (node for node in state.order if node.op in random.RULES and is_pinned(node))
    unseeded = [node for node in nodes if node.attr("seed", None) == 0 == node.attr("seed2", None)]
    values = [node.output(i) for node in unseeded for i in range(len(state.answers[node].outputs))]
    return [value for value in values if not state.source(value).placement.differs]


def _draw_edge(value: Value) -> EdgePlan:
    reason = "drawn without a seed: all processes take what the first one drew"
    dtype = dtypes.dtype_name(value.dtype)
    return EdgePlan(value.name, "single", "replicated", lowering="host_reduce", dtype=dtype, reason=reason)


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


def _edge(plan: Plan, state: Propagation, owners: Owners, value: Value, target: str, reason: str) -> EdgePlan:
    fact = state.source(value)
    owner = owners.of(value) if target == "replicated" and not fact.is_local else STEP
    placement = "replicated" if value in state.whole_inputs else repr(fact.placement)
    lowering = _lowering(plan, fact, target)
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
        bytes=static_bytes(_as_sent(fact)),
        reason=reason,
    )


def _homed(
    plan: Plan, state: Propagation, found: Mapping[tuple[str, str], EdgePlan]
) -> dict[tuple[str, str], EdgePlan]:
    """Return the edges as they are lowered where variables live on single devices."""
    if not plan.homes:
        return dict(found)
    lower = _at_home if len(plan.processes) == 1 else _through_servers
    return {key: replace(edge, lowering=lower(plan, state, edge)) for key, edge in found.items()}


def _at_home(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return how values meet on the device of their owner, where one process has all replicas."""
    placement = state.source(state.graph.value(edge.value)).placement
    if edge.owner not in plan.homes or edge.to != repr(REPLICATED):
        return edge.lowering
    if placement.is_split:
        return "concat"
    return ("add_n" if placement == PARTIAL else "fold") if placement.is_partial else edge.lowering


def _through_servers(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return how a value crosses between the processes of a job with servers: none of them by a collective."""
    fact = state.source(state.graph.value(edge.value))
    if edge.lowering in ("collective_gather", "host_gather"):
        return "server_gather"
    if edge.lowering not in ("collective_reduce", "host_reduce"):
        return edge.lowering
    return "accumulator" if fact.placement == PARTIAL and _as_sent(fact).dtype in ACCUMULATED else "server_reduce"


def _as_sent(fact: Fact) -> Fact:
    """Return the fact in the type that travels."""
    placement = fact.placement
    return fact._replace(dtype=combine.wire_type(fact.dtype, placement.op)) if placement.is_partial else fact


def _lowering(plan: Plan, fact: Fact, target: str) -> str:
    if target.startswith("split"):
        return "slice"
    if target.startswith("partial"):
        return "zeros"
    if target == "local":
        return "local_size"
    crosses = len(plan.processes) > 1
    if fact.is_local:
        counted = any(rows_per_example(entry) is None for entry in fact.value or () if is_local(entry))
        return "host_reduce" if crosses and counted else "global_size"
    mirrored = plan.mode == "mirrored" and plan.replicas > 1
    if fact.placement.is_partial:
        wire = combine.wire_type(fact.dtype, fact.placement.op)
        if mirrored and wire in combine.COLLECTIVE_TYPES:
            return "collective_reduce"
        if crosses:
            return "host_reduce"
        return "add_n" if fact.placement == PARTIAL else "fold"
    if mirrored and can_gather_collectively(fact, rows_per_example(fact.split_size), plan.devices):
        return "collective_gather"
    return "host_gather" if crosses else "concat"


def static_bytes(fact: Fact) -> int:
    """Return the bytes of one instance; an unknown size counts as 1."""
    sizes = [dim if isinstance(dim, int) else dim.coef if dim is not None else 1 for dim in fact.shape or ()]
    return math.prod(sizes) * dtypes.width(fact.dtype)


class Owners:
    """Finds the variable that an edge serves."""

    def __init__(self, state: Propagation, variables: Mapping[str, Variable]) -> None:
        self._state = state
        self._by_handle = {variable.handle: variable for variable in variables.values()}
        self._knows_trained = any(variable.trainable for variable in variables.values())

    def of(self, value: Value) -> str:
        """Return the owner of the reduction or gather of `value`."""
        fact = self._state.source(value)
        sparse = fact.placement.is_split
        if not sparse and not fact.shape:
            return STEP if fact.shape == () and not self._scalar_variables() else self._search(value, fact.shape, False)
        return self._search(value, fact.shape, sparse)

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
                if sparse and (_mixes_rows(node) or node.op in MEASURES):
                    continue
                for other in [node.output(index)] if node.op == "IdentityN" else self._made(node):
                    if other not in seen and self._follows(other, shape, sparse):
                        seen.add(other)
                        pending.append(other)
        alike = [v for v in reached if v.shape == shape] or reached
        owners = [v for v in alike if v.trainable] if self._knows_trained else alike
        return next((v.name for v in owners), STEP)

    def _updated_by(self, node: Node) -> Variable | None:
        if not is_update(node):
            return None
        return self._by_handle.get(handle_of(node.inputs[0]).node.name)

    def _reads(self, handle: Value) -> list[Value]:
        """Return what is read from a variable, also inside branches and loops."""
        pending, found = [handle_of(handle)], []
        while pending:
            for node, _ in pending.pop()._uses:
                if node.op == "ReadVariableOp":
                    found.append(node.output())
                elif node.op in PASSES_HANDLES and node in self._state.answers:
                    pending += self._made(node)
        return found

    def _made(self, node: Node) -> list[Value]:
        answer = self._state.answers.get(node)
        return [] if answer is None else [node.output(i) for i in range(len(answer.outputs))]

    def _follows(self, value: Value, shape: Shape | None, sparse: bool) -> bool:
        fact = self._state.facts[value]
        if sparse:  # rows: their number changes when duplicates are merged
            return fact.shape is None or len(fact.shape) >= 1
        if fact.shape is None or shape is None:
            return True
        return fact.shape == shape or _elements(fact.shape) == _elements(shape)


def _mixes_rows(node: Node) -> bool:
    rule = TABLE.get(node.op)
    return rule is not None and rule.family in MIXES_ROWS


def _elements(shape: Shape) -> int | None:
    if any(not isinstance(dim, int) or is_local(dim) for dim in shape):
        return None
    return math.prod(dim for dim in shape if isinstance(dim, int))
