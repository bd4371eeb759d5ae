"""Cut a replica's tensors into blocks for its logical devices.

    before   MatMul(x, up) ─► Relu ─► MatMul(., down) ─► y
    after    MatMul(x, up/part_k) ─► Relu/part_k ─► MatMul(., down/part_k) ─► AddN ─► y        k on logical device k

A node that computes blocks becomes one node on each device. Every other node runs once, on logical device 0, on sums
(AddN) and whole values (ConcatV2) that are computed once for all their readers. The result is an ordinary graph for
every later pass: each replica runs it on its devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial, reduce

from autograph_rewrite.analysis.propagate import Propagation, notes
from autograph_rewrite.analysis.variable_uses import require_cuttable
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MODEL, Mesh
from autograph_rewrite.ir.recorded_shapes import record_shapes, static_shape
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_handle
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact
from autograph_rewrite.ops.rules.marked import make_whole, may_be_cut
from autograph_rewrite.passes.base.anchors import outputs_of
from autograph_rewrite.passes.base.claims import claims_of
from autograph_rewrite.passes.base.order_accesses import access_order
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize.whole_uses import use_whole
from autograph_rewrite.passes.sharding.local_program import LocalProgram, ModelBlocks, obstacle
from autograph_rewrite.passes.sharding.placements import (
    ModelPlacements,
    model_placements,
)
from autograph_rewrite.passes.sharding.residence import step_of
from autograph_rewrite.passes.sharding.shard_variables import (
    WholeVariables,
    in_pieces,
    in_shards,
    pieces_of,
    shard_variables,
)
from autograph_rewrite.plan.parts.messages import EdgePlan, Model, VariableRequest
from autograph_rewrite.plan.parts.names import EDGE_ATTR, model_axis_name
from autograph_rewrite.plan.parts.residence import REPLICATED as REPLICATED_VARIABLE
from autograph_rewrite.plan.parts.residence import Sharded, placed
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import HOST, run_devices
from autograph_rewrite.resolve import model_axis
from autograph_rewrite.resolve.batch import batch_facts
from autograph_rewrite.resolve.model_axis import Round
from autograph_rewrite.resolve.wire_types import are_in_order
from autograph_rewrite.training_graph import Shards, TrainingGraph, Variable

# The conversions between logical devices, by the node that computes each, while axis after axis of the mesh is cut.
#
#     axis 0    h = AddN(h/part_0, h/part_1)                            one exchange: h, on axis 0
#     axis 1    h/part_j = AddN(h/part_0/part_j, h/part_1/part_j)       two, of half the bytes: among devices (., j)
#
# If a further axis divides an exchange, each group of its devices has one.


@dataclass
class Exchanges:
    """The exchanges between the devices of a model axis.

    Attributes:
        axis: the one that is being cut.
        cuts: the axis and the dimension that will cut each copy of a tensor.
        programs: of one device, if all devices of a replica run the same: one program for each axis.
        certificate: compares each program with the graph before it.
    """

    axis: int = 0
    cuts: dict[Node, tuple[int, int]] = field(default_factory=dict)
    programs: list[LocalProgram] = field(default_factory=list)
    certificate: Certifier | None = None
    _made: dict[Node, list[tuple[EdgePlan, Node | None]]] = field(default_factory=dict)

    def add(self, made: Sequence[Node], value: Value, edge: EdgePlan, fact: Fact | None, share: Fraction) -> None:
        """Record a conversion; the bytes that each device sends are counted if shapes are static.

        Args:
            made: the nodes that convert the value; the first is the key.
            value: the operand.
            edge: its placements and lowering.
            fact: of the whole value, if known.
            share: of its elements that are sent.
        """
        shape = fact.shape if fact is not None else None
        is_known = shape is not None and all(isinstance(dim, int) for dim in shape)
        elements = math.prod(dim for dim in shape or () if isinstance(dim, int)) if is_known else 0
        dtype = value.dtype
        size = int(elements * share) * dtypes.width(dtype)
        for node in made:
            node.set_attr(EDGE_ATTR, model_axis_name(self.axis))
        self._made.setdefault(made[0], []).append((replace(edge, axis=self.axis, bytes=size), value.node))

    def divide(self, node: Node, copies: Sequence[Node], sizes: Sequence[int] = ()) -> None:
        """Give each device of a further axis a separate conversion, or copy that is cut later, instead of one.

        Args:
            node: computed the conversion.
            copies: compute it on each device.
            sizes: units that each converts; empty: all convert as much as `node` did.
        """
        if node in self.cuts:
            self.cuts |= dict.fromkeys(copies, self.cuts.pop(node))
        made = self._made.pop(node, [])
        for k, copy in enumerate(copies if made else ()):
            share = Fraction(sizes[k], sum(sizes)) if sizes else Fraction(1)
            self._made[copy] = [(replace(edge, value="", bytes=int(edge.bytes * share)), None) for edge, _ in made]

    def edges(self, graph: Graph, step: Collection[Node]) -> list[EdgePlan]:
        """Return the conversions of a step; those of initialisers happen once, and are not listed.

        Args:
            graph: after all axes have cut.
            step: the nodes that one step runs.
        """
        found = []
        for node, made in self._made.items():
            if node not in step or graph.nodes.get(node.name) is not node:
                continue
            for edge, of in made:
                value = node.inputs[0] if edge.lowering == "slice" else node.output()
                is_named = edge.value and graph.nodes.get(edge.node) in (None, of)  # else its name is another's by now
                found.append(edge if is_named else replace(edge, value=value.name))
        return found


READ_BY_NONE = "the placement of '{}' on the model axis does nothing: no output, update or initialiser reads it"
HELD_THERE = "'{}' is cut on the model axis, so the devices of each replica hold it, and not what the strategy chose"


def partition(
    graph: Graph,
    item: TrainingGraph,
    plan: Plan,
    task: int = 0,
    *,
    alike: bool = True,
    certificate: Certifier | None = None,
) -> tuple[Exchanges, TrainingGraph, Plan]:
    """Cut variables and tensors on the model axis as the plan says; return the exchanges, and the new item and request.

    If several axes cut, they all do so in one program per device, or none does.

    Args:
        graph: a flat graph, which is edited, or a copy of it; its anchors are the outputs of the item.
        task: which of the plan's processes the graph is for.
        alike: let all devices of a replica run one program, if that is possible.
        certificate: compares that program with the graph before it.

    Raises:
        PlanError: a variable or tensor cannot be cut as the plan says.
        GraphError: a use of a variable is impossible with blocks.
        PassError: under `strict`, an op reads blocks for which it has no rule.
    """
    model = plan.model
    assert model is not None
    alike = alike and ALONG and plan.mode == "mirrored" and bool(model.shardings)
    if alike and (why := why_apart(plan)):
        alike, plan = False, replace(plan, notes=(*plan.notes, FIRST_ONLY.format(why)))
    if alike:
        copy = graph.clone()  # an obstacle is found only while the graph is edited
        copy.current_pass, copy.edits = graph.current_pass, graph.edits
        try:
            made = _partition_axes(copy, replace(item, source=copy), plan, task, alike=True, certificate=certificate)
        except _ApartError as found:
            plan = replace(plan, notes=(*plan.notes, FIRST_ONLY.format(found)))
        else:
            if made[0].programs:
                return made
    return _partition_axes(graph, item, plan, task, alike=False, certificate=certificate)


class _ApartError(Exception):
    """The program of one device cannot be written; the message says why."""


def _partition_axes(
    graph: Graph, item: TrainingGraph, plan: Plan, task: int, *, alike: bool, certificate: Certifier | None
) -> tuple[Exchanges, TrainingGraph, Plan]:
    assert plan.model is not None
    read_by_none = [one.name for one in plan.model.shardings if not _is_there(one.name, graph, item)]
    there = tuple(one for one in plan.model.shardings if one.name not in read_by_none)
    model, unused = replace(plan.model, shardings=there), [READ_BY_NONE.format(name) for name in read_by_none]
    devices = run_devices(plan, task)
    if plan.mode == "shared":
        devices = devices[: model.size]
    in_blocks = [one.name for one in model.shardings if one.split and one.name in item.variables]
    gathered = tuple(f"model axis: {note}" for note in use_whole(graph, item, in_blocks))
    plan = replace(plan, notes=(*plan.notes, *unused, *_assign(graph, item, model)))
    cuts = {one.name: model_axis.cut_dimensions(one, model.axes) for one in model.shardings if one.split}
    whole = [one.name for one in model.shardings if not one.split]
    exchanges = Exchanges(cuts=boundaries(graph, item, cuts), certificate=certificate)
    kept = keep_whole(graph, item, [one.name for one in model.shardings if not one.split and one.device < 0])
    names = model_axis.names_of(model.axes)
    for axis, size in enumerate(model.axes):
        exchanges.axis = axis
        variables = {name: dims[axis] for name, dims in cuts.items() if name in item.variables}
        wanted = {
            one.name: dim
            for name, dim in variables.items()
            if dim is not None
            for one in pieces_of(item.variables[name])
        }
        within = replace(item, source=graph, variables=shard_variables(item.variables))
        rounds = model_axis.rounds_of(size, within, wanted, _tensors(graph, exchanges), whole) if size > 1 else []
        if alike and len(rounds) > 1:
            raise _ApartError("blocks are of several sizes")
        for cut in rounds:
            within, plan = _partition(graph, within, plan, cut, exchanges, names[axis], alike=alike)
        item = replace(item, source=graph, variables=in_pieces(item.variables, within.variables))
        if not alike:
            model_axis.settle(topological_order(graph), axis)
    for node in kept:
        may_be_cut(node)
    if alike:
        edges = [edge for program in exchanges.programs for edge in program.edges]
        return exchanges, item, replace(plan, model_edges=tuple(edges))
    plan = replace(plan, notes=(*plan.notes, *gathered))
    model_axis.number_devices(graph, model.axes)
    item = replace(item, variables=_on_devices(graph, item, model, devices))
    return exchanges, item, replace(plan, model_edges=tuple(exchanges.edges(graph, step_of(graph, item))))


def _is_there(name: str, graph: Graph, item: TrainingGraph) -> bool:
    """Return whether the graph still has a variable or tensor that is placed by hand."""
    return name in item.variables or name.partition(":")[0] in graph.nodes


def _on_devices(graph: Graph, item: TrainingGraph, model: Model, devices: Sequence[str]) -> dict[str, Variable]:
    """Return the variables, with the devices of their blocks."""
    found = dict(item.variables)
    for name, variable in item.variables.items():
        if variable.shards is not None:
            places = [graph.nodes[handle].at(MODEL) for handle in variable.shards.handles]
            first = range(0, len(devices), model.size)
            held = tuple(devices[begin + place] for begin in first for place in places)
            found[name] = replace(variable, shards=replace(variable.shards, devices=held))
    return found


def _assign(graph: Graph, item: TrainingGraph, model: Model) -> list[str]:
    """Put variables and tensors that are assigned to one logical device there; return notes on those that stay."""
    notes = []
    for one in model.shardings:
        if one.device < 0:
            continue
        variable = item.variables.get(one.name)
        if variable is None:
            model_axis.assign(graph.value(one.name).node, one.device, model.axes)
        elif variable.captured:
            notes.append(f"'{one.name}' stays on the first device: the function's variable lives there")
        else:
            for node in _together(graph.nodes[variable.handle]):
                model_axis.assign(node, one.device, model.axes)
    return notes


def _together(handle: Node) -> set[Node]:
    """Return the nodes that touch a variable, the variables that the same nodes touch, and so on."""
    found, pending = {handle}, [handle]
    while pending:
        for use in handle_uses(pending.pop()):
            if use.node not in found:
                found.add(use.node)
                others = {handle_node(value) for value in use.node.inputs if is_handle(value)} - found
                found |= others
                pending += others
    return found


ALONG = True
"""Whether the devices of a model axis run one program on their blocks, if they can."""


FIRST_ONLY = "model axis: what is whole runs on the first device of each replica only: {}"


def why_apart(plan: Plan) -> str:
    """Return why the devices of a replica cannot all run one program; empty if they can."""
    assert plan.model is not None
    count, devices = plan.model.size, plan.model.devices
    replicas = [devices[i : i + count] for i in range(0, len(devices), count)]
    lines = Mesh.of(1, model=count, divided=model_axis.divided_of(plan.model.axes))
    groups = [devices[i::count] for i in range(count)]
    groups += [
        tuple(own[i] for i in line)
        for own in replicas
        for name in model_axis.names_of(plan.model.axes).values()
        for line in lines.lines([name])
    ]
    reasons = {
        "something is assigned to one of them": any(one.device >= 0 for one in plan.model.shardings),
        # A store on a server adds up one value per process, not one per device.
        "servers of a job hold variables": bool(plan.server_homes) and len(plan.processes) > 1,
        # TensorFlow's collectives are keyed by the frame that they run in, and each device has a separate loop.
        "micro-batches are a loop": plan.looped,
        "TensorFlow puts the devices in another order": not all(map(are_in_order, groups)),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _partition(
    graph: Graph, item: TrainingGraph, plan: Plan, cut: Round, exchanges: Exchanges, axis: str, *, alike: bool
) -> tuple[TrainingGraph, Plan]:
    batch, step = batch_facts(graph, item, plan), step_of(graph, item)
    found = model_placements(graph, item, cut, step, batch, axis=axis if alike else MODEL, alike=alike)
    if alike and (why := obstacle(found, cut)):
        raise _ApartError(why)
    whole = notes(found.state)
    if plan.semantics.strict and whole:
        node, text = whole[0]
        hint = "set semantics.strict to false to run it whole, which is correct but slower"
        raise PassError(f"{node.op} '{node.name}' cannot be cut on the model axis: {text}", node=node, hint=hint)
    for handle, name in found.names.items():
        require_cuttable(name, handle, set(found.members))
    said = [f"model axis: {node.op} '{node.name}' works on whole values: {text}" for node, text in whole]
    said += gathered_reads(found.state, step)
    program = LocalProgram(found, cut, exchanges.axis, axis if alike else MODEL, alike)
    if alike:
        exchanges.programs.append(program)
        write(program, outputs_of(graph, item), plan, exchanges.certificate)
        item = _in_local_shapes(item, found, cut)
        cuts, sharded = program.variables(), {one.name for one in plan.variables if one.over_replicas}
        said += [HELD_THERE.format(name) for name in cuts if _is_elsewhere(plan, name) and name not in sharded]
        blocks = {name: (cut, item.variables[name].shape or ()) for name, cut in cuts.items()}
        return item, replace(plan, notes=(*plan.notes, *said), variables=_blocks_in_shards(plan, blocks))
    handles = _write_apart(program, item, exchanges)
    said += [HELD_THERE.format(name) for name in found.names.values() if _is_elsewhere(plan, name)]
    plan, cuts = replace(plan, notes=(*plan.notes, *said)), program.variables()
    shards = {name: Shards(one.axis, one.sizes, handles[name]) for name, one in cuts.items()}
    return in_shards(graph, item, plan, shards, cuts, {name: name for name in cuts})


def _write_apart(program: LocalProgram, item: TrainingGraph, exchanges: Exchanges) -> dict[str, tuple[str, ...]]:
    """Write the nodes that differ once per device; return the handles of the blocks of variables."""
    state, found = program.state, program.found
    unroll = program.unrolled(item.targets, partial(model_axis.put, axis=exchanges.axis))
    for node, copies in unroll.clones.items():
        placed = [state.source(value).placement for value in node.outputs if value in state.facts]
        if any(one.differs for one in placed):
            exchanges.divide(node, copies, program.cut.sizes if any(one.is_split for one in placed) else ())
    for edge, node in program.made:
        value, share = unroll.sources[node], program.conversions[node].share()
        exchanges.add(unroll.lowered[node], value, edge, found.whole.facts.get(value), share)
    return {name: tuple(copy.name for copy in unroll.clones[handle]) for handle, name in found.names.items()}


def write(program: LocalProgram, outputs: Sequence[Value], plan: Plan, certificate: Certifier | None) -> None:
    """Write the program of one device.

    Args:
        outputs: values that callers read.
        certificate: compares it with the graph before.

    Raises:
        VerifyError: the program does not compute the same.
    """
    if certificate is None:
        program.write()
        return
    claims = claims_of(program.state, outputs, replace(plan, devices=(HOST,) * len(program.cut.sizes), micro=None))
    before = program.state.graph.clone()
    certificate.placed(before, claims)
    program.write()
    certificate.written(before, program.state.graph, claims)


def _in_local_shapes(item: TrainingGraph, found: ModelPlacements, cut: Round) -> TrainingGraph:
    """Return the item, whose variables have the shapes of one device's blocks."""
    variables = dict(item.variables)
    for handle, name in found.names.items():
        member = found.members[handle]
        shape = tuple(size // len(cut.sizes) if i == member.axis else size for i, size in enumerate(member.shape))
        variables[name] = replace(variables[name], shape=shape)
    return replace(item, variables=variables)


def _blocks_in_shards(
    plan: Plan, blocks: Mapping[str, tuple[Sharded, Sequence[int | None]]]
) -> tuple[VariableRequest, ...]:
    """Return the requests, in which replicas have shards of each device's block, and not of the whole.

    Args:
        blocks: how variables are cut into blocks, and the shape of a block.
    """
    found = []
    for request in plan.variables:
        where = plan.residences[request.name]
        if request.name in blocks and isinstance(where, Sharded) and where.stage:
            cut, shape = blocks[request.name]
            axis = where.axis if cut.axis else 0  # blocks of rows stay in rows, so that a lookup works on both axes
            where = replace(where, axis=axis, sizes=model_axis.sizes_of(shape[axis] or 0, plan.replicas))
        elif request.name in blocks:
            request, where = replace(request, server=None), REPLICATED_VARIABLE
        found.append(placed(request, where))
    return tuple(found)


def _is_elsewhere(plan: Plan, name: str) -> bool:
    """Return whether a request has a variable on a server, or in shards over the replicas."""
    return name in plan.residences and plan.residences[name] != REPLICATED_VARIABLE


# Boundaries: copies of the tensors that are placed by hand, each to be cut by one axis along one dimension.
#
#     before   x ──► MatMul                                            x: axis 0 cuts dimension 0, axis 1 dimension 1
#     after    x ──► x/sharded (0: 0) ──► x/sharded_1 (1: 1) ──► MatMul
#
# The copies are added before anything is cut: each device of one axis then has a copy that the next axis cuts.


def boundaries(
    graph: Graph, item: TrainingGraph, cuts: Mapping[str, Sequence[int | None]]
) -> dict[Node, tuple[int, int]]:
    """Add the copies of all tensors; return the axis and the dimension that cut each.

    Args:
        item: its variables are skipped.
        cuts: the dimension that each axis cuts, by the name of a variable or a tensor.
    """
    found = {}
    for name, dims in cuts.items():
        if name in item.variables:
            continue
        value = graph.value(name)
        for axis, dim in enumerate(dims):
            if dim is None:
                continue
            node = Builder.at(graph.value(name).node).node("Identity", value, what="sharded")
            found[node] = axis, dim
            record_shapes(node, [static_shape(value)])
            value.replace_all_uses_with(node.output(), keep=[node])
            value = node.output()
    return found


def keep_whole(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> list[Node]:
    """Let readers of tensors see the whole on every axis; return the nodes to unmark once all axes are cut.

    Args:
        item: its variables are skipped.
        names: of replicated variables and tensors.
    """
    kept = []
    for name in names:
        if name in item.variables:
            continue
        value = graph.value(name)
        node = value.node
        if node.op != "Identity":
            node = Builder.at(node).node("Identity", value, what="whole")
            record_shapes(node, [static_shape(value)])
            value.replace_all_uses_with(node.output(), keep=[node])
        make_whole(node)
        kept.append(node)
    return kept


def _tensors(graph: Graph, exchanges: Exchanges) -> dict[str, int]:
    """Return the copies that the axis cuts, with the dimension; mark them, as their operands are whole."""
    found = [node for node in graph if node in exchanges.cuts and exchanges.cuts[node][0] == exchanges.axis]
    for node in found:
        make_whole(node)
    return {node.name: exchanges.cuts[node][1] for node in found}


# Notes on nodes that read a value whole of which the devices hold blocks: each costs a gather in a step.
#
#     z: split(1) ──► Sort      model axis: Sort 'Sort' reads 'z' whole, of which each device has a block (split(1))
#
# This is right, but slow. An op without a rule has another note, which `semantics.strict` refuses.


def gathered_reads(state: Propagation, step: Container[Node]) -> Iterator[str]:
    """Yield a note for each node of a step that reads blocks whole, and has no other note."""
    for node in state.order:
        made = state.transfers[node]
        if node not in step or made.note or not made.inputs or any(fact.placement.differs for fact in made.outputs):
            continue
        if node.op == "VariableShape":  # a constant
            continue
        for index, want in made.operand_reshards.items():
            placement = made.inputs[index].placement
            if want == REPLICATED and placement.is_split:
                value = node.inputs[index].name
                yield (
                    f"model axis: {node.op} '{node.name}' reads '{value}' whole, of which each device has a block "
                    f"({placement!r})"
                )
                break


def _run(rewrite: Rewrite) -> None:
    """Cut tensors, and the nodes that compute them, into blocks for the logical devices of each replica."""
    whole = rewrite.item.variables
    certificate = rewrite.request.certificate
    exchanges, item, rewrite.plan = partition(
        rewrite.graph, rewrite.item, rewrite.plan, rewrite.task, certificate=certificate
    )
    if exchanges.programs:
        assert rewrite.plan.model is not None
        rewrite.graph, rewrite.along = item.graph, rewrite.plan.model.size
        rewrite.put(reduce(ModelBlocks.and_then, [program.blocked() for program in exchanges.programs]))
        rewrite.put(WholeVariables(whole))
        rewrite.item = item
    else:
        rewrite.put(WholeVariables(item.variables))
        rewrite.item = replace(item, variables=shard_variables(item.variables))
    rewrite.put(access_order(rewrite.graph, rewrite.targets))


PARTITION_MODEL = Pass("partition-model", _run, lambda rewrite: rewrite.plan.model is not None, gives=(WholeVariables,))
