"""The folded step: what one step runs, how often, and what belongs to the update of which variable.

    forward, backward ──► gradient ══► region of w: moments, scaled gradient, assignment      serves nothing but w
                                  ══ the edge that w's update owns

The graph is analysed once; plans that differ in placements, buckets or compressors are all played on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.fact import PARTIAL
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.roles import PASSES_HANDLES, handle_of, is_update
from autograph_rewrite.analysis.rules import TABLE
from autograph_rewrite.analysis.rules.base import LocalEntry, Slice
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.frames import Frame, frames_of
from autograph_rewrite.ir.graph import Graph, Node, Span, Value
from autograph_rewrite.ir.walk import ancestors, descendants
from autograph_rewrite.item import GraphItem, Variable
from autograph_rewrite.passes import edges as edge_list
from autograph_rewrite.passes import pipeline
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.prune import prune
from autograph_rewrite.passes.reshard import assign_spans
from autograph_rewrite.passes.rewriting import anchor_outputs
from autograph_rewrite.plan.parts import STEP, Options, VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.shards import axis_of


@dataclass(frozen=True)
class Folded:
    """One step, analysed.

    Attributes:
        item: the normalised item.
        state: the placements.
        outputs: the values that the outside reads whole.
        order: the nodes that a step runs, producers first.
        each: those that run on every replica.
        frames: the loops of the nodes that are in one.
        region: the variable whose update a node belongs to, where it serves nothing else.
        beside: those of them that do not depend on the gradient: what weight decay adds to it.
        slots: the state that an optimizer keeps for each trained variable.
        handles: variables by the name of the node that gives their handle.
    """

    item: GraphItem
    state: Propagation
    outputs: tuple[Value, ...]
    order: tuple[Node, ...]
    each: frozenset[Node]
    frames: dict[Node, Frame]
    region: dict[Node, str]
    beside: frozenset[Node]
    slots: dict[str, tuple[str, ...]]
    handles: dict[str, str]

    def resolve(self, plan: Plan) -> Plan:
        """Return the plan with its edges: those of whole variables, where some are split; `cost` splits them itself."""
        if plan.edges and not splits(plan):
            return plan
        edges = edge_list.resolve(whole(plan), self.state, self.outputs, self.item.variables).edges
        return replace(plan, edges=edges)

    def variable_of(self, node: Node) -> str | None:
        """Return the name of the variable that a node reads or writes by its handle."""
        if not node.inputs or node.op in PASSES_HANDLES:
            return None
        return self.handles.get(handle_of(node.inputs[0]).node.name)


def splits(plan: Plan) -> bool:
    """Return whether some variable is split."""
    return any(axis_of(request.placement) is not None for request in plan.variables)


def whole(plan: Plan) -> Plan:
    """Return the request without shards: a variable that is split over servers is on the first of them."""
    requests = (
        replace(one, placement="single" if one.servers else "replicated", servers=one.servers[:1], sizes=(), stage=0)
        if axis_of(one.placement) is not None
        else one
        for one in plan.variables
    )
    return replace(plan, variables=tuple(requests), edges=())


def neutral(plan: Plan) -> Plan:
    """Return the plan with every variable replicated."""

    def plain(options: Options) -> Options:
        return replace(options, synchronizer="all_reduce")

    requests = (VariableRequest(one.name, options=plain(one.options)) for one in plan.variables)
    return replace(plan, variables=tuple(requests), default=plain(plan.default))


def _homed(plan: Plan) -> Plan:
    """Return the request without shards, as propagation has to see it.

    Shards in one process have gradients of their own, so that none of them is computed of the whole batch: as if their
    variable were on a server.
    """
    plain = whole(plan)
    if len(plan.processes) > 1:
        return plain
    split = {one.name for one in plan.variables if axis_of(one.placement) is not None}
    requests = (
        replace(one, placement="single", servers=plan.devices[:1]) if one.name in split else one
        for one in plain.variables
    )
    return replace(plain, variables=tuple(requests))


def fold(item: GraphItem, plan: Plan) -> Folded:
    """Analyse a normalised item under a plan.

    Raises:
        GraphError: it has no batch input.
    """
    graph = item.graph.clone()
    anchor_outputs(graph, item)
    prune(graph, _step_roots(graph, item))
    state, outputs = pipeline.analyse(graph, item, _homed(plan))
    plan = neutral(replace(plan, edges=()))
    frames = frames_of(state.order)
    handles = {variable.handle: name for name, variable in item.variables.items()}
    assign_spans(Context(graph, plan, state, frames, frozenset(handles)))
    resolved = edge_list.resolve(plan, state, outputs, item.variables)
    slots = find_slots(state.order, item.variables, handles)
    region = _regions(state.order, resolved, graph, handles, slots, outputs)
    gradients = {graph.nodes[edge.node] for edge in resolved.edges if edge.owner != STEP and edge.node in graph}
    return Folded(
        item,
        state,
        tuple(outputs),
        tuple(needed(state.order, outputs)),
        frozenset(node for node in state.order if node.span is Span.EACH),
        frames,
        region,
        frozenset(region.keys() - descendants(gradients, controls=False)),
        slots,
        handles,
    )


def needed(order: Iterable[Node], outputs: Iterable[Value]) -> list[Node]:
    """Return the nodes that a step runs: gradients that somebody merely waits for are left out, as TensorFlow does."""
    nodes = list(order)
    effects = [node for node in nodes if is_update(node) or is_pinned(node)]
    kept = ancestors([*effects, *(value.node for value in outputs)], controls=False)
    return [node for node in nodes if node in kept or node.op == "NoOp"]


def wanted(state: Propagation, node: Node, index: int) -> str | None:
    """Return the placement that an input is converted to, as the plan's edges name it; None where it is not."""
    value = node.inputs[index]
    want = state.answers[node].wants.get(index)
    if want is None:
        if value in state.whole_inputs:
            return f"split({state.whole_inputs[value]})"
        return "replicated" if value in state.reduced and state.source(value).placement.differs else None
    if isinstance(want, LocalEntry):
        return "local"
    if isinstance(want, Slice):
        return f"split({want.dim})"
    return "partial(sum)" if want == PARTIAL else "replicated"


def find_slots(
    order: Iterable[Node], variables: dict[str, Variable], handles: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the optimizer's state of each trained variable: what its update is computed from, elementwise."""
    found: dict[str, dict[str, None]] = {}
    knows = any(variable.trainable for variable in variables.values())
    for node in order:
        if not is_update(node):
            continue
        owner = handles.get(handle_of(node.inputs[0]).node.name)
        if owner is None or (knows and not variables[owner].trainable):
            continue
        own = found.setdefault(owner, {})
        for name in _read_elementwise(node, variables[owner].shape, handles, variables):
            if name != owner and not variables[name].trainable:
                own[name] = None
    taken: set[str] = set()
    result = {}
    for owner, names in found.items():
        mine = tuple(name for name in names if name not in taken and name not in found)
        taken.update(mine)
        result[owner] = mine
    return result if knows else {name: slots for name, slots in result.items() if name not in taken}


def _read_elementwise(
    update: Node, shape: object, handles: dict[str, str], variables: dict[str, Variable]
) -> Iterable[str]:
    """Yield variables of some shape that reach an update through ops which work element by element."""
    pending = list(update.inputs)
    seen: set[Node] = {update}
    while pending:
        value = pending.pop()
        node = value.node
        if node in seen:
            continue
        seen.add(node)
        if value.dtype == dtypes.RESOURCE or node.op == "ReadVariableOp":
            handle = handle_of(value if value.dtype == dtypes.RESOURCE else node.inputs[0]).node
            name = handles.get(handle.name)
            if name is not None and variables[name].shape == shape and shape != ():
                yield name
            continue
        rule = TABLE.get(node.op)
        if is_update(node) or (rule is not None and rule.family in ("elementwise", "layout")):
            pending += node.inputs
    return


def _step_roots(graph: Graph, item: GraphItem) -> list[Node]:
    names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    names += [info.tensor.partition(":")[0] for info in item.inputs.values()]
    names += [variable.handle for variable in item.variables.values()]
    return [graph.nodes[name] for name in dict.fromkeys(names) if name in graph.nodes]


def _regions(
    order: Iterable[Node],
    resolved: Plan,
    graph: Graph,
    handles: dict[str, str],
    slots: dict[str, tuple[str, ...]],
    outputs: Iterable[Value],
) -> dict[Node, str]:
    """Return the nodes that come after a variable's gradient, or beside it, and serve nothing but its update."""
    gradients: dict[str, list[Node]] = {}
    for edge in resolved.edges:
        if edge.owner != STEP and edge.node in graph:
            gradients.setdefault(edge.owner, []).append(graph.nodes[edge.node])
    owner_of = {slot: owner for owner, own in slots.items() for slot in own}
    names = list(gradients)
    bit = {name: 1 << i for i, name in enumerate(names)}
    other = 1 << len(names)
    serves: dict[Node, int] = {value.node: other for value in outputs}
    nodes = list(order)
    for node in reversed(nodes):
        mask = serves.get(node, 0)
        if is_update(node):
            variable = handles.get(handle_of(node.inputs[0]).node.name, "")
            mask |= bit.get(owner_of.get(variable, variable), other)
        serves[node] = mask
        for value in node.inputs:
            serves[value.node] = serves.get(value.node, 0) | mask
    before = {name: ancestors(made, controls=False) for name, made in gradients.items()}
    by_bit = {mask: name for name, mask in bit.items()}
    found = {}
    for node in nodes:
        owner = by_bit.get(serves[node])
        if owner is not None and node not in before[owner] and not re.fullmatch("VarHandleOp|Placeholder", node.op):
            found[node] = owner
    return found
