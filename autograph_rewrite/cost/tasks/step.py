"""Analyse a step: its nodes, how often they run, and the variable whose update each belongs to.

    forward, backward ──► gradient ══► region of w: moments, scaled gradient, assignment      used for w only
                                  ══ the edge that w's update owns

One analysis is used to simulate all plans that differ only in the homes of variables, buckets or compressors. With a
model axis the analysed graph is that after the pass `partition-model`: blocks, each on its logical device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autograph_rewrite.analysis.liveness import buffers_of
from autograph_rewrite.analysis.op_work import NOTHING, Work, executed, rows_given, runs, trips_of, work_of
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.variable_uses import VariableUse, update_regions, variable_uses
from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.ir.control_flow import Frame, frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import descendants, grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, updates_rows
from autograph_rewrite.ops.facts.concrete_sizes import Shape, Sizes
from autograph_rewrite.ops.facts.placement import PARTIAL
from autograph_rewrite.ops.rules.base import LocalEntry, Slice
from autograph_rewrite.ops.rules.table import rule_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.anchors import anchor_outputs
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.reshard.insert_reshards import assign_spans
from autograph_rewrite.passes.sharding.partition_model import partition
from autograph_rewrite.passes.sharding.shard_variables import pieces_of, shard_variables
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan, Options, VariableRequest
from autograph_rewrite.plan.parts.residence import REPLICATED, OnServer, Residence, Sharded, placed, residence_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.edges import reshard_edges as edge_list
from autograph_rewrite.resolve.model_axis import logical_devices
from autograph_rewrite.resolve.remat.step_memory import variable_bytes
from autograph_rewrite.resolve.wire_types import sizes_of
from autograph_rewrite.training_graph import TrainingGraph, Variable


@dataclass(frozen=True)
class AnalyzedStep:
    """One step, analysed.

    Attributes:
        item: the normalised item.
        outputs: the values that are fetched whole.
        order: the nodes that a step runs, producers first.
        each: those that run on every replica.
        frames: the loops around nodes that are in one.
        region: nodes that are used only for the update of one variable, with its name.
        beside: nodes of `region` that do not depend on the gradient: the terms of weight decay.
        uses: how the step uses each variable: its updates, and its slots.
        handles: variables by the name of the node that gives their handle.
        logical: the logical device of each node; empty without a model axis.
        blocks: the blocks of variables that the model axis splits, by name; the item has these blocks instead.
        model_edges: the conversions between the logical devices of a replica.
    """

    item: TrainingGraph
    state: Propagation
    outputs: tuple[Value, ...]
    order: tuple[Node, ...]
    each: frozenset[Node]
    frames: dict[Node, Frame]
    region: dict[Node, str]
    beside: frozenset[Node]
    uses: dict[str, VariableUse]
    handles: dict[str, str]
    logical: Mapping[Node, int] = field(default_factory=dict)
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    model_edges: tuple[EdgePlan, ...] = ()

    def resolve(self, plan: Plan) -> Plan:
        """Return the plan with its edges; split variables get the edges of whole ones, which `cost` splits itself."""
        plan = self._in_blocks(plan)
        if plan.edges and not splits(plan):
            return plan
        plain = whole(plan)
        sizes = sizes_of(plain, self.state)
        found = edge_list.resolve_edges(plain, self.state, self.outputs, self.item.variables, sizes)
        return replace(plan, edges=found.edges, batch=found.batch)

    def _in_blocks(self, plan: Plan) -> Plan:
        """Return the plan with requests for blocks in place of the variables that the model axis splits."""
        found: list[VariableRequest] = []
        for request in plan.variables:
            blocks = self.blocks.get(request.name, ())
            found += [VariableRequest(name, options=request.options) for name in blocks] if blocks else [request]
        return replace(plan, variables=tuple(found))

    def variable_of(self, node: Node) -> str | None:
        """Return the name of the variable whose handle is a node's first input."""
        if not node.inputs or has(node.op, "forwards_handle"):
            return None
        return self.handles.get(handle_node(node.inputs[0]).name)


def splits(plan: Plan) -> bool:
    """Return whether some variable is split."""
    return any(isinstance(one, Sharded) for one in plan.residences.values())


def whole(plan: Plan) -> Plan:
    """Return the request without shards: a variable that is split over servers is on the first of them."""
    return _joined(plan, lambda cut: cut.of_shard(0))


def _joined(plan: Plan, residence: Callable[[Sharded], Residence]) -> Plan:
    """Return the request with another residence for every split variable."""
    requests = (
        placed(request, residence(found)) if isinstance(found := residence_of(request), Sharded) else request
        for request in plan.variables
    )
    return replace(plan, variables=tuple(requests), edges=())


def neutral(plan: Plan) -> Plan:
    """Return the plan with every variable replicated."""

    def plain(options: Options) -> Options:
        return replace(options, synchronizer="all_reduce")

    requests = (VariableRequest(one.name, options=plain(one.options)) for one in plan.variables)
    return replace(plan, variables=tuple(requests), default=plain(plan.default))


def _homed(plan: Plan) -> Plan:
    """Return the request without shards, as propagation needs it.

    In one process, the gradient of each shard is reduced separately and not computed from the whole batch. Propagation
    treats a variable on a server in the same way.
    """
    return whole(plan) if len(plan.processes) > 1 else _joined(plan, lambda cut: OnServer(plan.devices[0]))


def fold(item: TrainingGraph, plan: Plan, batch: int | None = None) -> AnalyzedStep:
    """Analyse a normalised item under a plan.

    Args:
        plan: its edges are ignored.
        batch: examples of the global batch, where the graph does not say.

    Raises:
        GraphError: it has no batch input.
    """
    graph = _step_graph(item)
    blocks: dict[str, tuple[str, ...]] = {}
    model_edges: tuple[EdgePlan, ...] = ()
    if plan.model is not None:
        _, item, plan = partition(graph, item, plan, alike=False)
        model_edges = plan.model_edges
        cut = {name: one for name, one in item.variables.items() if one.shards is not None}
        blocks = {name: tuple(piece.name for piece in pieces_of(one)) for name, one in cut.items()}
        item = replace(item, variables=shard_variables(item.variables))
    homed = _homed(plan)
    if splits(plan) and plan.remat is not None and plan.remat.limit is not None:
        uses = fold(item, replace(plan, remat=None), batch).uses
        homed = _with_same_room(homed, plan, item.variables, {name: use.owner or name for name, use in uses.items()})
    state, outputs = pass_pipeline.analyse(graph, item, homed, batch)
    plan = neutral(replace(plan, edges=()))
    frames = frames_of(state.order)
    handles = {variable.handle: name for name, variable in item.variables.items()}
    rewrite = Rewrite(Request(item, plan), graph, plan, item, plan)
    rewrite.put(state)
    assign_spans(rewrite)
    plain = replace(plan, pipeline=None)  # only the owners of edges are needed here, which do not depend on stages
    resolved = edge_list.resolve_edges(plain, state, outputs, item.variables, sizes_of(plan, state, batch))
    owned = [edge for edge in resolved.edges if edge.owner != STEP and edge.node in graph]
    uses = variable_uses(state, item.variables, gradients={graph.value(edge.value): edge.owner for edge in owned})
    gradients = grouped((edge.owner, graph.nodes[edge.node]) for edge in owned)
    region = update_regions(state.order, uses, gradients, [value.node for value in outputs])
    made = [node for nodes in gradients.values() for node in nodes]
    return AnalyzedStep(
        item,
        state,
        tuple(outputs),
        tuple(executed(state.order, outputs)),
        frozenset(node for node in state.order if node.span == EACH),
        frames,
        region,
        frozenset(region.keys() - descendants(made, controls=False)),
        uses,
        handles,
        logical_devices(state.order) if plan.model is not None else {},
        blocks,
        model_edges,
    )


def cut_model(item: TrainingGraph, plan: Plan) -> tuple[dict[str, int], tuple[EdgePlan, ...]]:
    """Return the dimension that the model axis splits of each variable, and the edges between logical devices.

    Raises:
        RewriteError: a variable or value cannot be split so.
    """
    _, made, cut = partition(_step_graph(item), item, plan, alike=False)
    shards = {name: one.shards for name, one in made.variables.items() if one.shards is not None}
    return {name: one.axis for name, one in shards.items()}, cut.model_edges


def _step_graph(item: TrainingGraph) -> Graph:
    """Return a copy of the part of a graph that a step needs."""
    graph = item.graph.clone()
    anchor_outputs(graph, item)
    eliminate_dead_code(graph, _step_roots(graph, item))
    return graph


def wanted(state: Propagation, node: Node, index: int) -> str | None:
    """Return the placement to which an input is converted, as edges name it; None if it is not converted."""
    value = node.inputs[index]
    reshard = state.transfers[node].operand_reshards.get(index)
    if reshard is None:
        if value in state.whole_inputs:
            return f"split({state.whole_inputs[value]})"
        return "replicated" if value in state.reduced and state.source(value).placement.differs else None
    if isinstance(reshard, LocalEntry):
        return "local"
    if isinstance(reshard, Slice):
        return f"split({reshard.dim})"
    return "partial(sum)" if reshard == PARTIAL else "replicated"


def _step_roots(graph: Graph, item: TrainingGraph) -> list[Node]:
    names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    names += [info.tensor.partition(":")[0] for info in item.inputs.values()]
    names += [variable.handle for variable in item.variables.values()]
    return [graph.nodes[name] for name in dict.fromkeys(names) if name in graph.nodes]


def _with_same_room(whole: Plan, plan: Plan, variables: Mapping[str, Variable], owners: Mapping[str, str]) -> Plan:
    """Return the request without shards, with a budget that leaves tensors as much memory as they have with shards."""
    assert whole.remat is not None
    assert whole.remat.limit is not None
    more = variable_bytes(whole, variables) - _held(plan, variables, owners)
    return replace(whole, remat=replace(whole.remat, policy=f"budget:{whole.remat.limit + more}"))


def _held(plan: Plan, variables: Mapping[str, Variable], owners: Mapping[str, str]) -> int:
    """Return the bytes of variables and slots on the replica's device that holds the most of them."""
    residences, everywhere, homes = plan.residences, 0, Counter[str]()
    for name, variable in variables.items():
        owner = owners.get(name, name)
        found = residences.get(owner, REPLICATED)
        if not isinstance(found, Sharded) or not found.servers or found.keeps_whole(is_slot=name != owner):
            if name in plan.homes:
                homes[plan.homes[name]] += variable.nbytes
            else:
                everywhere += variable.nbytes
            continue
        for server, size in zip(found.servers, found.sizes, strict=True):
            homes[server] += variable.nbytes * size // sum(found.sizes)
    return everywhere + max((homes[device] for device in plan.devices), default=0)


# FLOPs and bytes of every node of an analysed step, counted once for all plans that are simulated on it.


_INDEX = dtypes.INT32


class OpCounts(NamedTuple):
    """The work and memory of one node.

    Attributes:
        work: of one instance.
        made: its outputs, with their bytes.
        targets: the placement to which each input is converted, or None.
        hands_on: its outputs are the memory of its first input.
        reuses: its output may reuse the memory of an input.
        runs: how often it runs in one step.
        scratch: bytes that it needs while it runs, besides its outputs.
        patches: bytes of image patches that it needs in addition; the same for one micro-batch as for all of them.
        rows: bytes of the rows and indices of an update of rows, as if all indices were distinct.
    """

    work: Work
    made: tuple[tuple[Value, int], ...]
    targets: tuple[str | None, ...]
    hands_on: bool
    reuses: bool
    runs: int
    scratch: int = 0
    patches: int = 0
    rows: int = 0


def count(folded: AnalyzedStep, sizes: Sizes, cpu: Machine | None) -> dict[Node, OpCounts]:
    """Count the work and memory of each node of a step.

    Args:
        cpu: the machine whose CPU runs the step; None for accelerators.
    """
    state, frames, found = folded.state, folded.frames, {}
    trips = trips_of(folded.order, frames)
    buffers = buffers_of(state, folded.order, frames, sizes)
    distinct: dict[Value, Shape] = {}
    for node in folded.order:
        nbytes, hands_on, reuses, is_run = buffers[node]
        if not is_run:  # of two branches, only the other one is counted
            found[node] = OpCounts(NOTHING, (), (None,) * len(node.inputs), False, False, 0)
            continue
        values = [node.output(i) for i in range(len(nbytes))]
        facts = [state.facts[value] for value in node.inputs]
        inputs = [distinct.get(value) or sizes.shape(fact) for value, fact in zip(node.inputs, facts, strict=True)]
        distinct |= _distinct(node, _joined_shape(folded, node, inputs[0], sizes) if inputs else (), distinct)
        outputs = [distinct.get(value) or sizes.shape(state.source(value)) for value in values]
        work = work_of(node, inputs, outputs, float(sum(map(sizes.nbytes, facts)) + sum(nbytes)))
        copies = node.op == "ReadVariableOp" and not hands_on
        found[node] = OpCounts(
            Work("elementwise", 0.0, 2.0 * sum(nbytes)) if copies else work,
            tuple(zip(values, nbytes, strict=True)),
            tuple(wanted(state, node, index) for index in range(len(node.inputs))),
            hands_on,
            reuses,
            runs(frames.get(node, ()), trips) * (sizes.micro if node in folded.each else 1),
            _scratch(node, inputs),
            _patches(node, inputs, outputs, cpu),
            _rows(node, inputs),
        )
    return found


def _distinct(node: Node, first: Shape, known: Mapping[Value, Shape]) -> dict[Value, Shape]:
    """Return the shape of an output that merges rows by id, as if all ids were distinct; the real number is not known.

    Args:
        first: the shape of its first operand, as it reads it.
        known: the shapes of such outputs of earlier nodes.
    """
    merges = node.op == "UnsortedSegmentSum" and has(node.inputs[1].node.op, "unique")
    hands_on = node.op == "Identity" and node.inputs[0] in known
    return {node.output(0): first} if has(node.op, "unique") or merges or hands_on else {}


def _joined_shape(folded: AnalyzedStep, node: Node, shape: Shape, sizes: Sizes) -> Shape:
    """Return the shape of a node's first operand; that of the joined blocks if the node reads them joined."""
    placement = folded.state.source(node.inputs[0]).placement
    if not shape or not placement.is_split or placement.dim or wanted(folded.state, node, 0) != "replicated":
        return shape
    return (shape[0] * sizes.replicas * sizes.micro, *shape[1:])


def _rows(node: Node, inputs: Sequence[Shape]) -> int:
    """Return the bytes of the rows of an update, and of an index for each."""
    if not updates_rows(node):
        return 0
    value, rows = rows_given(node, inputs)
    return math.prod(rows) * dtypes.width(value.dtype) + rows[0] * dtypes.width(_INDEX) if rows else 0


def _scratch(node: Node, inputs: Sequence[Shape]) -> int:
    """Return the bytes that a kernel needs while it runs."""
    rule = rule_of(node.op)
    if rule is None or rule.scratch is None:
        return 0
    return rule.scratch(node.attr, inputs) * dtypes.width(node.output().dtype)


def _patches(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape], cpu: Machine | None) -> int:
    """Return the bytes of image patches that a kernel needs on a CPU while it runs."""
    rule = rule_of(node.op)
    if cpu is None or rule is None or rule.patches is None:
        return 0
    width = dtypes.width(node.output().dtype)
    if cpu.onednn and width <= dtypes.width(dtypes.FLOAT):
        return 0
    return rule.patches(inputs, outputs, width, cpu.cores) * width
