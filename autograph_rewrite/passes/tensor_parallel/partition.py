"""Cut a replica's tensors into blocks for its logical devices.

    before   MatMul(x, up) ─► Relu ─► MatMul(., down) ─► y
    after    MatMul(x, up/part_k) ─► Relu/part_k ─► MatMul(., down/part_k) ─► AddN ─► y        k on logical device k

What a device has a block of runs there, as a node of its own; everything else runs once, on logical device 0, of sums
(AddN) and whole values (ConcatV2) that are made once for all their readers. The result is an ordinary graph, which
every later pass takes as it is: each replica runs it, on the devices of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, notes
from autograph_rewrite.analysis.variable_uses import require_cuttable
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.control_flow import awaited
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MODEL, Mesh
from autograph_rewrite.ir.recorded_shapes import record_shapes, static_shape
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_handle
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import is_local
from autograph_rewrite.ops.facts.windows import READ, Halo, Rows
from autograph_rewrite.ops.rules.base import WHOLE, LocalEntry, Reshard, Slice
from autograph_rewrite.passes.base.anchors import outputs_of
from autograph_rewrite.passes.base.claims import claims_of
from autograph_rewrite.passes.base.order_accesses import access_order
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize.whole_uses import GATHERED, read_before_loops
from autograph_rewrite.passes.tensor_parallel.local_program import LocalProgram, ModelBlocks, obstacle
from autograph_rewrite.passes.tensor_parallel.placements import (
    SEGMENT_SUM,
    ModelPlacements,
    model_placements,
    sums_by_rows,
)
from autograph_rewrite.passes.variable_sharding.emitter import Emitter
from autograph_rewrite.passes.variable_sharding.handle_uses import Uses
from autograph_rewrite.passes.variable_sharding.pieces import WholeVariables, in_pieces, pieces_of, shard_variables
from autograph_rewrite.passes.variable_sharding.residence import step_of
from autograph_rewrite.passes.variable_sharding.shard_propagation import ShardPlacements
from autograph_rewrite.passes.variable_sharding.shard_variables import in_shards
from autograph_rewrite.plan.parts.messages import EdgePlan, Model, VariableRequest
from autograph_rewrite.plan.parts.names import MODEL_AXIS_ATTR
from autograph_rewrite.plan.parts.residence import REPLICATED as REPLICATED_VARIABLE
from autograph_rewrite.plan.parts.residence import Sharded, placed
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import HOST, run_devices
from autograph_rewrite.resolve.batch import batch_facts
from autograph_rewrite.resolve.model_axis import (
    Round,
    assign,
    cut_dimensions,
    divided_of,
    names_of,
    number_devices,
    put,
    rounds_of,
    settle,
    sizes_of,
)
from autograph_rewrite.resolve.wire_types import are_in_order
from autograph_rewrite.training_graph import Shards, TrainingGraph, Variable

# The conversions between logical devices, kept by the node that makes each while axis after axis of the mesh is cut.
#
#     axis 0    h = AddN(h/part_0, h/part_1)                            one exchange: h, on axis 0
#     axis 1    h/part_j = AddN(h/part_0/part_j, h/part_1/part_j)       two, of half the bytes: among devices (., j)
#
# An exchange that a further axis divides is one of each group of its devices.


ALL = Fraction(1)


@dataclass
class Exchanges:
    """What devices of one axis exchange.

    Attributes:
        axis: the one that is being cut.
        cuts: of copies of tensors, which axis will cut them along which dimension.
        programs: of one device, where all devices of a replica run the same: as each axis has left it.
        certificate: compares it with what it is written of.
    """

    axis: int = 0
    cuts: dict[Node, tuple[int, int]] = field(default_factory=dict)
    programs: list[LocalProgram] = field(default_factory=list)
    certificate: Certifier | None = None
    _made: dict[Node, list[tuple[EdgePlan, Node | None]]] = field(default_factory=dict)

    def add(self, made: Node, value: Value, edge: EdgePlan, fact: Fact | None, share: Fraction = ALL) -> None:
        """Keep a conversion; what each device hands over is counted where shapes are static.

        Args:
            made: what converts the value.
            value: what is converted.
            edge: its placements and lowering.
            fact: what is known of the whole value.
            share: of its elements, those that are handed over.
        """
        shape = fact.shape if fact is not None else None
        is_known = shape is not None and all(isinstance(dim, int) for dim in shape)
        elements = math.prod(dim for dim in shape or () if isinstance(dim, int)) if is_known else 0
        dtype = made.output_dtypes[0]
        size = int(elements * share) * dtypes.width(dtype)
        self.mark(made)
        told = replace(edge, axis=self.axis, dtype=dtypes.dtype_name(dtype), bytes=size, reason="devices of a replica")
        self._made.setdefault(made, []).append((replace(told, value=value.name), value.node))

    def mark(self, node: Node) -> None:
        """Say of a node that devices of this axis meet there."""
        node.set_raw_attr(MODEL_AXIS_ATTR, encode("int", self.axis))

    def divide(self, node: Node, copies: Sequence[Node], sizes: Sequence[int] = ()) -> None:
        """Let the devices of a further axis make a conversion, or a copy that is cut later, each group of them its own.

        Args:
            node: what made the conversion.
            copies: what makes it on each device.
            sizes: units of what each converts; empty: all convert as much as `node` did.
        """
        if node in self.cuts:
            self.cuts |= dict.fromkeys(copies, self.cuts.pop(node))
        made = self._made.pop(node, [])
        for k, copy in enumerate(copies if made else ()):
            share = Fraction(sizes[k], sum(sizes)) if sizes else ALL
            self._made[copy] = [(replace(edge, value="", bytes=int(edge.bytes * share)), None) for edge, _ in made]

    def edges(self, graph: Graph, step: Collection[Node]) -> list[EdgePlan]:
        """Return the conversions of a step; those of initialisers happen once, and are not listed.

        Args:
            graph: as it is in the end.
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
    """Cut what the plan wants cut on the model axis; return the item and the request with blocks instead of it.

    What the devices exchange comes with them. Where several axes cut, all of them do so the same way.

    Args:
        graph: a flat graph, which is edited, or a copy of it; the outputs of the item are its anchors.
        item: the item; its variables say what was cut, in `shards`.
        task: which of the plan's processes the graph is for.
        alike: let all devices of a replica run one program, where that is possible.
        certificate: compares that program with what it is written of.

    Raises:
        PlanError: something cannot be cut as the plan says.
        GraphError: a variable is used in a way that no block of it could be.
        PassError: under `strict`, an op reads blocks for which it has no rule.
    """
    model = plan.model
    assert model is not None
    alike = alike and ALONG and plan.mode == "mirrored" and bool(model.shardings)
    if alike and (why := why_apart(plan)):
        alike, plan = False, replace(plan, notes=(*plan.notes, FIRST_ONLY.format(why)))
    if alike:
        copy = graph.clone()  # what cannot be done is found out while it is edited
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
    """The program of one device cannot be written, and why."""


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
    read = read_before_loops(graph, item, [one.name for one in model.shardings if one.split])
    gathered = tuple(f"model axis: {GATHERED.format(*one)}" for one in read)
    plan = replace(plan, notes=(*plan.notes, *unused, *_assign(graph, item, model)))
    cuts = {one.name: cut_dimensions(one, model.axes) for one in model.shardings if one.split}
    whole = [one.name for one in model.shardings if not one.split]
    exchanges = Exchanges(cuts=boundaries(graph, item, cuts), certificate=certificate)
    kept = keep_whole(graph, item, [one.name for one in model.shardings if not one.split and one.device < 0])
    names = names_of(model.axes)
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
        rounds = rounds_of(size, within, wanted, _tensors(graph, exchanges), whole) if size > 1 else []
        if alike and len(rounds) > 1:
            raise _ApartError("blocks are of several sizes")
        for cut in rounds:
            within, plan = _partition(graph, within, plan, cut, exchanges, names[axis], alike=alike)
        item = replace(item, source=graph, variables=in_pieces(item.variables, within.variables))
        if not alike:
            settle(topological_order(graph), axis)
    for node in kept:
        node.drop_attr(WHOLE)
    if alike:
        edges = [edge for program in exchanges.programs for edge in program.edges]
        return exchanges, item, replace(plan, model_edges=tuple(edges))
    plan = replace(plan, notes=(*plan.notes, *gathered))
    number_devices(graph, model.axes)
    item = replace(item, variables=_on_devices(graph, item, model, devices))
    return exchanges, item, replace(plan, model_edges=tuple(exchanges.edges(graph, step_of(graph, item))))


def _is_there(name: str, graph: Graph, item: TrainingGraph) -> bool:
    """Return whether a step has what is placed by hand: what nothing reads has been dropped."""
    return name in item.variables or name.partition(":")[0] in graph.nodes


def _on_devices(graph: Graph, item: TrainingGraph, model: Model, devices: Sequence[str]) -> dict[str, Variable]:
    """Return the variables, whose blocks say on which devices they are."""
    found = dict(item.variables)
    for name, variable in item.variables.items():
        if variable.shards is not None:
            places = [graph.nodes[handle].at(MODEL) for handle in variable.shards.handles]
            first = range(0, len(devices), model.size)
            held = tuple(devices[begin + place] for begin in first for place in places)
            found[name] = replace(variable, shards=replace(variable.shards, devices=held))
    return found


def _assign(graph: Graph, item: TrainingGraph, model: Model) -> list[str]:
    """Put what is assigned to one logical device there; return what stays where its user made it."""
    notes = []
    for one in model.shardings:
        if one.device < 0:
            continue
        variable = item.variables.get(one.name)
        if variable is None:
            assign(graph.value(one.name).node, one.device, model.axes)
        elif variable.captured:
            notes.append(f"'{one.name}' stays on the first device: the function's variable lives there")
        else:
            for node in _together(graph.nodes[variable.handle]):
                assign(node, one.device, model.axes)
    return notes


def _together(handle: Node) -> set[Node]:
    """Return what touches a variable, with the variables that the same ops touch, and what touches those."""
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
"""Whether the devices of a model axis run one program where they can, each of its blocks."""


FIRST_ONLY = "model axis: what is whole runs on the first device of each replica only: {}"


def why_apart(plan: Plan) -> str:
    """Return why devices of a replica do not all run the same, each with copies of its own; empty where they may."""
    assert plan.model is not None
    count, devices = plan.model.size, plan.model.devices
    replicas = [devices[i : i + count] for i in range(0, len(devices), count)]
    lines = Mesh.of(1, model=count, divided=divided_of(plan.model.axes))
    groups = [devices[i::count] for i in range(count)]
    groups += [
        tuple(own[i] for i in line)
        for own in replicas
        for name in names_of(plan.model.axes).values()
        for line in lines.lines([name])
    ]
    reasons = {
        "something is assigned to one of them": any(one.device >= 0 for one in plan.model.shardings),
        # A store on a server adds up one value of each process, and not one of each of its devices.
        "servers of a job hold variables": bool(plan.server_homes) and len(plan.processes) > 1,
        # TensorFlow's collectives are keyed by the frame that they run in, and each device has a loop of its own.
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
    if alike:
        program = LocalProgram(found, cut, exchanges.axis, axis)
        exchanges.programs.append(program)
        write(program, outputs_of(graph, item), plan, exchanges.certificate)
        item = _in_local_shapes(item, found, cut)
        cuts, sharded = program.variables(), {one.name for one in plan.variables if one.over_replicas}
        said += [HELD_THERE.format(name) for name in cuts if _is_elsewhere(plan, name) and name not in sharded]
        blocks = {name: (cut, item.variables[name].shape or ()) for name, cut in cuts.items()}
        return item, replace(plan, notes=(*plan.notes, *said), variables=_blocks_in_shards(plan, blocks))
    uses = Uses(Partitioner(graph, _shares(found, cut), cut.sizes, exchanges, item.targets), found.names)
    uses.run()
    said += [HELD_THERE.format(name) for name in found.names.values() if _is_elsewhere(plan, name)]
    plan = replace(plan, notes=(*plan.notes, *said))
    shards, cuts = {}, {}
    for handle, made in uses.handles.items():
        name, member = found.names[handle], found.members[handle]
        sizes = tuple(size * member.rows for size in cut.sizes)
        cuts[name] = Sharded(member.axis, sizes)
        shards[name] = Shards(member.axis, sizes, tuple(node.name for node in made))
    return in_shards(graph, item, plan, shards, cuts, {name: name for name in cuts})


def write(program: LocalProgram, outputs: Sequence[Value], plan: Plan, certificate: Certifier | None) -> None:
    """Write the program of one device.

    Args:
        outputs: values that the outside reads.
        certificate: compares it with the graph as it was.

    Raises:
        VerifyError: it computes something else.
    """
    if certificate is None:
        program.write()
        return
    claims = claims_of(program.state, outputs, replace(plan, devices=(HOST,) * program.count, micro=None))
    before = program.state.graph.clone()
    certificate.placed(before, claims)
    program.write()
    certificate.written(before, program.state.graph, claims)


def _in_local_shapes(item: TrainingGraph, found: ModelPlacements, cut: Round) -> TrainingGraph:
    """Return the item, whose variables have the shapes that one device has of them."""
    variables = dict(item.variables)
    for handle, name in found.names.items():
        member = found.members[handle]
        shape = tuple(size // len(cut.sizes) if i == member.axis else size for i, size in enumerate(member.shape))
        variables[name] = replace(variables[name], shape=shape)
    return replace(item, variables=variables)


def _blocks_in_shards(
    plan: Plan, blocks: Mapping[str, tuple[Sharded, Sequence[int | None]]]
) -> tuple[VariableRequest, ...]:
    """Return the requests, in which the replicas have shards of the block of each device, and not of the whole.

    Args:
        blocks: how variables are cut into blocks, and the shape of one.
    """
    found = []
    for request in plan.variables:
        where = plan.residences[request.name]
        if request.name in blocks and isinstance(where, Sharded) and where.stage:
            cut, shape = blocks[request.name]
            axis = where.axis if cut.axis else 0  # who looks rows up looks them up on both axes
            where = replace(where, axis=axis, sizes=sizes_of(shape[axis] or 0, plan.replicas))
        elif request.name in blocks:
            request, where = replace(request, server=None), REPLICATED_VARIABLE
        found.append(placed(request, where))
    return tuple(found)


def _shares(found: ModelPlacements, cut: Round) -> ShardPlacements:
    """Return the placements as those of shards: what differs between devices, and what is cloned for them."""
    state = found.state
    facts = {value: state.source(value) for value in state.facts if state.source(value).placement.differs}
    facts = {value: fact for value, fact in facts.items() if not is_handle(value)}
    facts |= {value: state.facts[value] for value in found.tensors}
    cloned = {value.node for value in facts if value not in found.tensors}
    constant = {node for node, made in state.transfers.items() if made.constant}
    transfers = {node: made for node, made in state.transfers.items() if node in cloned or node in constant}
    return ShardPlacements(
        found.whole, cut.units, found.members, facts, transfers, dict(found.tensors), frozenset(state.reduced)
    )


def _is_elsewhere(plan: Plan, name: str) -> bool:
    """Return whether a request has a variable on a server, or in shards over the replicas."""
    return name in plan.residences and plan.residences[name] != REPLICATED_VARIABLE


class Partitioner(Emitter):
    """Clones nodes for logical devices, and converts values.

    Args:
        graph: the graph that is edited.
        shares: what is cut.
        sizes: units of each device.
        exchanges: gets the conversions.
        targets: names of the nodes that a step runs.

    Attributes:
        exchanges: the conversions.
    """

    def __init__(
        self,
        graph: Graph,
        shares: ShardPlacements,
        sizes: Sequence[int],
        exchanges: Exchanges,
        targets: Collection[str],
    ) -> None:
        super().__init__(graph, shares, sizes, targets)
        self.exchanges = exchanges
        self._halos = HaloExchange(self)

    def put(self, node: Node, place: int, *, keep: bool = False) -> None:
        """Put a node on a device of the axis.

        Args:
            keep: leave a node that is on one already where it is.
        """
        put(node, self.exchanges.axis, place, keep=keep)

    def pieces(self, value: Value, axis: int, rows: int = 1) -> tuple[Value, ...]:
        """Cut a whole value for its readers.

        Args:
            axis: which dimension is cut.
            rows: entries of it that belong to each unit.
        """
        is_new = (value, axis, rows) not in self._pieces
        made = super().pieces(value, axis, rows)
        if is_new:
            self.note(made[0].node, value, REPLICATED, split(axis), "slice")
        return made

    def note(
        self, made: Node, value: Value, before: Placement, after: Placement, lowering: str, share: Fraction = ALL
    ) -> None:
        """Keep a conversion for the plan.

        Args:
            made: what converts the value.
            value: what is converted.
            after: the one that it gets.
            share: of its elements, those that are handed over.
        """
        fact = self.shares.state.facts.get(value)
        edge = EdgePlan("", repr(before), repr(after), lowering=lowering)
        self.exchanges.add(made, value, edge, fact, share)

    def clone(self, node: Node) -> None:
        """Let a node run on each device, or a constant take its place."""
        transferred = self.shares.transfers[node]
        if node.op == SEGMENT_SUM and transferred.outputs[0].placement == REPLICATED:
            self.keep(node, sums_by_rows(self, node))
            return
        cut = halo_of(transferred.operand_reshards)
        if cut is not None:
            self._clone_with_halo(node, cut)
            return
        if not transferred.constant:
            super().clone(node)
            return
        for index, fact in enumerate(transferred.outputs):
            shape = [dim for dim in fact.shape or () if isinstance(dim, int)]
            content = np.array(fact.value, dtypes.numpy_dtype(fact.dtype)).reshape(shape)
            self.instead[node.output(index)] = self.const(content, content.dtype, node, f"folded_{index}")
        if node in self.shares.state.looped:
            self._keep_in_loop(node)
        self.clones[node] = tuple({value.node: None for value in map(self.instead.get, node.outputs) if value})

    def _keep_in_loop(self, node: Node) -> None:
        """Let constants wait for what the node that they stand for has read: a node without inputs is in no loop."""
        reshards = self.shares.transfers[node].operand_reshards
        read = [self._taken(value, reshards.get(i))[0] for i, value in enumerate(node.inputs)]
        nodes = [awaited(value, lambda value: self.add("Identity", [value], node, "taken").node) for value in read]
        for constant in filter(None, map(self.instead.get, node.outputs)):
            for one in nodes:
                constant.node.add_control(one)

    def _clone_with_halo(self, node: Node, cut: tuple[int, Halo]) -> None:
        reshards = self.shares.transfers[node].operand_reshards
        taken = [self._taken(value, reshards.get(i)) for i, value in enumerate(node.inputs)]
        made = [self._halos.copy(node, k, [values[k] for values in taken], cut) for k in self.shards]
        self.keep(node, [copy for copy, _ in made])
        self.parts[node.output()] = tuple(rows for _, rows in made)
        for copy, rows in made:
            if rows.node is not copy:
                copy.drop_attr("_output_shapes")

    def _taken(self, value: Value, reshard: Reshard | None) -> Sequence[Value]:
        if isinstance(reshard, Slice) and reshard.halo is not None:
            return self._halos.rows(value, reshard)
        return super()._taken(value, reshard)

    def keep(self, node: Node, copies: Sequence[Node]) -> None:
        """Remember what stands for a node on each device, and put it there."""
        super().keep(node, copies)
        for k, copy in enumerate(copies):
            self.put(copy, k)
        facts = [self.shares.facts.get(value) for value in node.outputs]
        if any(fact is not None and fact.placement.is_split for fact in facts):
            self.exchanges.divide(node, copies, self.sizes)
        elif any(fact is not None for fact in facts):
            self.exchanges.divide(node, copies)

    def finish(self) -> None:
        """Let conversions take the place of what runs on each device, and put what reads a block there."""
        for node, copies in self.clones.items():
            made = self.shares.transfers.get(node)
            if len(copies) == len(self.sizes) and not (made is not None and made.constant):  # those are for everybody
                for k, copy in enumerate(copies):
                    self.put(copy, k, keep=True)
        super().finish()

    def _local_entries(self, value: Value, reshard: LocalEntry) -> Sequence[Value]:
        """Return sizes of the whole with those of each device's block in one place."""
        if reshard.halo is not None:
            return self._halos.entries(value, reshard)
        entries = self.shares.fact(value).value or ()
        if all(isinstance(entry, int) for entry in entries) and value not in self.parts:
            return super()._local_entries(value, reshard)
        whole, chosen = self.whole(value), [i == reshard.position for i in range(len(entries))]
        extent = self.shares.extent
        return [self.scaled(whole, chosen, size, extent, f"part_{k}") for k, size in enumerate(self.sizes)]

    def _join(self, value: Value) -> Value:
        fact = self.shares.facts[value]
        if fact.placement.kind != "local":
            joined = super()._join(value)
            if value not in self.same:
                lowering = "add_n" if fact.placement == PARTIAL else "concat" if fact.placement.is_split else "fold"
                self.note(joined.node, value, fact.placement, REPLICATED, lowering)
            return joined
        chosen = [is_local(entry) for entry in fact.value or ()]
        return self.scaled(self.parts[value][0], chosen, self.shares.extent, self.sizes[0], "whole", fact)

    def scaled(
        self, value: Value, chosen: Sequence[bool], up: int, down: int, what: str, fact: Fact | None = None
    ) -> Value:
        """Return sizes of which some are counted in other units: `up` where there were `down`.

        Args:
            up: the units there shall be.
            what: told after the node's name.
            fact: of the sizes, where they are not a vector.
        """
        shape = [dim for dim in (fact.shape if fact else (len(chosen),)) or () if isinstance(dim, int)]
        near, dtype = value.node, dtypes.numpy_dtype(value.dtype)

        def numbers(units: int, name: str) -> Value:
            content: Any = np.array([units if one else 1 for one in chosen], dtype).reshape(shape)
            return self.const(content, dtype, near, f"{what}/{name}")

        more = self.add("Mul", [value, numbers(up, "up")], near, f"{what}/times")
        return self.add("FloorDiv", [more, numbers(down, "down")], near, what)


# Where tensors are cut that are placed by hand: copies of them, which say on which axis of the mesh along what.
#
#     before   x ──► MatMul                                            x: axis 0 cuts dimension 0, axis 1 dimension 1
#     after    x ──► x/sharded (0: 0) ──► x/sharded_1 (1: 1) ──► MatMul
#
# The copies are made before anything is cut: each device of one axis then has its own of what the next axis cuts.


def boundaries(
    graph: Graph, item: TrainingGraph, cuts: Mapping[str, Sequence[int | None]]
) -> dict[Node, tuple[int, int]]:
    """Add the copies of all tensors; return which axis cuts each along what.

    Args:
        item: whose variables are no tensors.
        cuts: which dimension each axis cuts, by the name of a variable or a tensor.
    """
    found = {}
    for name, dims in cuts.items():
        if name in item.variables:
            continue
        value = graph.value(name)
        for axis, dim in enumerate(dims):
            if dim is None:
                continue
            node = graph.add("Identity", [value], name=f"{graph.value(name).node.name}/sharded", origin=value.node)
            found[node] = axis, dim
            record_shapes(node, [static_shape(value)])
            value.replace_all_uses_with(node.output(), keep=[node])
            value = node.output()
    return found


def keep_whole(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> list[Node]:
    """Let readers of tensors see the whole on every axis; return what hands it to them, marked until all is cut.

    Args:
        item: whose variables are no tensors.
        names: of what is replicated, or on one device.
    """
    kept = []
    for name in names:
        if name in item.variables:
            continue
        value = graph.value(name)
        node = value.node
        if node.op != "Identity":
            node = graph.add("Identity", [value], name=f"{node.name}/whole", origin=node)
            record_shapes(node, [static_shape(value)])
            value.replace_all_uses_with(node.output(), keep=[node])
        node.set_raw_attr(WHOLE, encode("bool", True))
        kept.append(node)
    return kept


def _tensors(graph: Graph, exchanges: Exchanges) -> dict[str, int]:
    """Return the copies that the axis cuts, with the dimension; what they read is whole for all its devices."""
    found = [node for node in graph if node in exchanges.cuts and exchanges.cuts[node][0] == exchanges.axis]
    for node in found:
        node.set_raw_attr(WHOLE, encode("bool", True))
    return {node.name: exchanges.cuts[node][1] for node in found}


# What reads a value whole of which the devices hold blocks: every gather of a step, told with who asks for it.
#
#     z: split(1) ──► Sort      model axis: Sort 'Sort' reads 'z' whole, of which each device has a block (split(1))
#
# That is right, and costs a gather; what has no rule at all has a note of its own, which `semantics.strict` refuses.


def gathered_reads(state: Propagation, step: Container[Node]) -> Iterator[str]:
    """Yield a note for each node that reads blocks whole, and has no other note.

    Args:
        state: the placements.
        step: the nodes that one step runs.
    """
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
    """Cut tensors into blocks for the logical devices of each replica, and what is computed of them."""
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
        rewrite.put(access_order(rewrite.graph, rewrite.targets))
        return
    rewrite.put(WholeVariables(item.variables))
    rewrite.item = replace(item, variables=shard_variables(item.variables))
    rewrite.put(access_order(rewrite.graph, rewrite.targets))


def _has_model_axis(rewrite: Rewrite) -> bool:
    return rewrite.plan.model is not None


PARTITION_MODEL = Pass("partition-model", _run, _has_model_axis, gives=(WholeVariables,))


# Halo exchange: an op with a window runs on a block of rows, and on rows of its neighbours.
#
#     before   x ──► Conv2D, 3 rows, SAME ──► y                   8 rows, split along them over 2 devices
#     after    x/part_0, first row of x/part_1 ──► ConcatV2 ──► Conv2D, EXPLICIT (1, 0) ──► y/part_0      4 rows
#              last row of x/part_0, x/part_1 ──► ConcatV2 ──► Conv2D, EXPLICIT (0, 1) ──► y/part_1       4 rows
#
# Padding is left to the kernel, which knows what its op makes of it (zeros, or nothing at all in a maximum); a device
# states its own. The gradient of an input is computed for whole windows and cut to the device's rows: no window is
# divided, so that the first of several equal maxima is the same one.


def halo_of(reshards: Mapping[int, Reshard]) -> tuple[int, Halo] | None:
    """Return the dimension and the halo of a node's operands, None where it reads none."""
    for want in reshards.values():
        if isinstance(want, Slice) and want.halo is not None:
            return want.dim, want.halo
        if isinstance(want, LocalEntry) and want.halo is not None:
            return want.position, want.halo
    return None


def units_of(sizes: Sequence[int]) -> list[Rows]:
    """Return the first and the last unit of each device, from their numbers."""
    return list(pairwise(accumulate(sizes, initial=0)))


class HaloExchange:
    """Reads rows of neighbouring blocks.

    Args:
        emit: adds nodes for logical devices.
    """

    def __init__(self, emit: Partitioner) -> None:
        self._emit = emit
        self._units = units_of(emit.sizes)
        self._read: dict[tuple[Value, int, tuple[Rows, ...]], list[Value]] = {}

    def rows(self, value: Value, want: Slice) -> list[Value]:
        """Return what each device reads of a value.

        Args:
            value: cut along the dimension, or whole.
            want: the dimension and the halo.
        """
        assert want.halo is not None
        spans = tuple(want.halo.span(units) for units in self._units)
        key = value, want.dim, spans
        if key not in self._read:
            blocks = self._blocks(value, want)
            self._read[key] = [self._joined(blocks, span, want.dim, k) for k, span in enumerate(spans)]
            self._note(value, want, blocks, spans)
        return self._read[key]

    def _blocks(self, value: Value, want: Slice) -> list[tuple[Rows, Value, int]]:
        """Return where a value is: rows, what holds them, and on which device."""
        emit = self._emit
        assert want.halo is not None
        fact = emit.shares.facts.get(value)
        is_cut = fact is not None and fact.placement == split(want.dim) and value not in emit.shares.summed
        if value in emit.parts and is_cut:
            owned = [want.halo.own(units) for units in self._units]
            return [(rows, part, k) for k, (rows, part) in enumerate(zip(owned, emit.parts[value], strict=True))]
        last = want.halo.own(self._units[-1])[1]
        return [((0, last), emit.whole(value), 0)]

    def _note(
        self, value: Value, want: Slice, blocks: Sequence[tuple[Rows, Value, int]], spans: tuple[Rows, ...]
    ) -> None:
        """Keep the exchange for the plan, with the rows that a device reads of others."""
        taken = sum(
            max(0, min(end, span[1]) - max(first, span[0]))
            for (first, end), _, owner in blocks
            for k, span in enumerate(spans)
            if owner != k
        )
        if not taken:
            return
        before, lowering = (split(want.dim), "halo") if len(blocks) > 1 else (REPLICATED, "slice")
        share = Fraction(taken, blocks[-1][0][1])
        owned = [part for _, part, _ in blocks]
        read = self._read[value, want.dim, spans]
        made = next((rows for rows in read if rows not in owned), read[0])  # a block of another device, read as it is
        self._emit.note(made.node, value, before, split(want.dim), lowering, share)

    def _joined(self, blocks: Sequence[tuple[Rows, Value, int]], span: Rows, dim: int, device: int) -> Value:
        taken = []
        for (first, end), part, owner in blocks:
            begin, stop = max(first, span[0]), min(end, span[1])
            if begin < stop:
                rows = begin - first, stop - first
                whole = (begin, stop) == (first, end)
                taken.append(part if whole else self._slice(part, rows, dim, owner, f"halo_{device}"))
        if len(taken) == 1:
            return taken[0]
        at = self._on(self._emit.const(dim, np.int32, taken[0].node, f"halo_{device}/axis"), device)
        joined = self._emit.add("ConcatV2", [*taken, at], taken[0].node, f"with_halo_{device}")
        self._emit.exchanges.mark(joined.node)
        return self._on(joined, device)

    def _slice(self, value: Value, rows: Rows, dim: int, device: int, what: str) -> Value:
        """Return some rows of images, taken where they are."""
        near = value.node
        begin = [rows[0] if i == dim else 0 for i in range(4)]
        size = [rows[1] - rows[0] if i == dim else -1 for i in range(4)]
        limits = [
            self._on(self._emit.const(content, np.int32, near, f"{what}/{name}"), device)
            for name, content in (("begin", begin), ("size", size))
        ]
        return self._on(self._emit.add("Slice", [value, *limits], near, what), device)

    def entries(self, value: Value, want: LocalEntry) -> list[Value]:
        """Return the shape of what each device computes.

        Args:
            value: the shape of the whole.
            want: the entry that says how many rows there are.
        """
        assert want.halo is not None
        emit, found = self._emit, []
        entries = emit.shares.fact(value).value or ()
        for k, units in enumerate(self._units):
            first, end = want.halo.span(units)
            if value not in emit.parts and entries and all(isinstance(entry, int) for entry in entries):
                content = [end - first if i == want.position else entry for i, entry in enumerate(entries)]
                found.append(emit.const(content, dtypes.numpy_dtype(value.dtype), value.node, f"part_{k}"))
                continue
            chosen = [i == want.position for i in range(4)]
            rows = want.halo.window.rows
            found.append(emit.scaled(emit.whole(value), chosen, end - first, rows, f"halo_{k}"))
        return found

    def copy(self, node: Node, device: int, inputs: Sequence[Value], cut: tuple[int, Halo]) -> tuple[Node, Value]:
        """Add a copy of a node for one device; return it, and the device's rows of what it makes.

        Args:
            node: with a window.
            device: the number of the device.
            inputs: operands of the copy.
            cut: the dimension and the halo.
        """
        dim, halo = cut
        units = self._units[device]
        made = self._emit.copy(node, device, inputs)
        _pad(made, dim, halo.padding(units), halo.beside)
        self._emit.put(made, device)
        if halo.reads == READ:
            return made, made.output()
        begin, stop = units[0] * halo.rows, units[1] * halo.rows
        first, end = halo.window.neighbours((begin, stop))
        if (begin, stop) == (first, end):
            return made, made.output()
        return made, self._slice(made.output(), (begin - first, stop - first), dim, device, "own")

    def _on(self, value: Value, device: int) -> Value:
        self._emit.put(value.node, device)
        return value


def _pad(node: Node, dim: int, rows: Rows, beside: Rows) -> None:
    """State the padding of a copy: of its own rows, and beside them as before."""
    if not (any(rows) or any(beside)):
        node.set_attr("padding", b"VALID")
        if "explicit_paddings" in node.attrs:
            node.set_attr("explicit_paddings", ())
        return
    first = 2 if node.attr("data_format", b"NHWC").startswith(b"NC") else 1
    stated = [0] * 8
    for at, (before, after) in ((dim, rows), (2 * first + 1 - dim, beside)):
        stated[2 * at : 2 * at + 2] = before, after
    node.set_attr("padding", b"EXPLICIT")
    node.set_attr("explicit_paddings", tuple(stated))
