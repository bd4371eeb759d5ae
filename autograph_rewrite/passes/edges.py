"""Resolve a plan: list every edge where placements disagree, with owner, lowering, bytes and reason.

An edge belongs to the variable whose update it reaches along values of that variable's shape; every other edge (losses,
norms, batch statistics) belongs to the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.dims import is_local, unit
from autograph_rewrite.analysis.fact import PARTIAL, Fact, Shape
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.rules.base import LocalEntry, Slice
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.walk import descendants
from autograph_rewrite.item import Variable
from autograph_rewrite.passes import combine, compress_choice
from autograph_rewrite.passes.buckets import assign_buckets
from autograph_rewrite.plan import keys
from autograph_rewrite.plan.parts import STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan

PASSES_HANDLES = frozenset(("Identity", "Enter", "Switch", "RefEnter"))
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

    def need(value: Value, target: str, reason: str) -> None:
        fact = state.source(value)
        if (value.name, target) in found:
            return
        if target != "replicated" and (fact.placement.differs and value not in state.whole_inputs):
            need(value, "replicated", reason)
        found[value.name, target] = _edge(plan, state, owners, value, target, reason)

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
            elif state.source(value).placement.differs and value not in state.whole_inputs:
                need(value, "replicated", reason)
    for value in outputs:
        if state.source(value).placement.differs and value not in state.whole_inputs:
            need(value, "replicated", "it is an output")
    found = compress_choice.choose(plan, state, _without_statistics(state, found), variables)
    listed = compress_choice.with_factors(assign_buckets(plan, state, found), state, variables)
    return plan.with_edges(keys.with_keys(listed, plan.devices))


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
    return EdgePlan(
        value=value.name,
        from_=placement,
        to=target,
        owner=owner,
        lowering=_lowering(plan, fact, target),
        dtype=dtypes.dtype_name(fact.dtype),
        bytes=static_bytes(fact),
        reason=reason,
    )


def _lowering(plan: Plan, fact: Fact, target: str) -> str:
    if target.startswith("split"):
        return "slice"
    if target.startswith("partial"):
        return "zeros"
    if target == "local":
        return "local_size"
    if fact.is_local:
        return "global_size"
    mirrored = plan.mode == "mirrored" and plan.replicas > 1
    if fact.placement.is_partial:
        wire = combine.wire_type(fact.dtype, fact.placement.op)
        if mirrored and wire in combine.COLLECTIVE_TYPES:
            return "collective_reduce"
        return "add_n" if fact.placement == PARTIAL else "fold"
    if mirrored and combine.can_gather_collectively(fact, unit(fact.split_size), plan.devices):
        return "collective_gather"
    return "concat"


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


def _elements(shape: Shape) -> int | None:
    if any(not isinstance(dim, int) or is_local(dim) for dim in shape):
        return None
    return math.prod(dim for dim in shape if isinstance(dim, int))


def is_update(node: Node) -> bool:
    """Return whether a node writes a variable."""
    return node.op.startswith(("ResourceApply", "ResourceSparseApply", "ResourceScatter")) or node.op in (
        "AssignVariableOp",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "ResourceStridedSliceAssign",
    )


def handle_of(value: Value) -> Value:
    """Follow a variable's handle back to the node that gives it."""
    while value.node.op in PASSES_HANDLES and value.node.inputs:
        value = value.node.inputs[0]
    return value
