"""Shard variables, before the graph is analysed.

    before   w: split(0), sizes 3 2     read(w) ──► MatMul      ResourceApplyAdam(w, m, v, dw)
    after    w/part_0: 3 rows           concat(reads) ──► MatMul
             w/part_1: 2 rows           ResourceApplyAdam(w/part_k, m/part_k, v/part_k, dw/shards:k)

Later passes see ordinary variables: their gradients are reduced, compressed and placed one by one, each with its
server (docs/architecture.md, "Shards on servers"). A variable's slots are cut with it. Initial values are computed
once and cut. A checkpoint holds the whole: a save reads the whole, and a restore updates it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.propagate import propagate, revise
from autograph_rewrite.analysis.variable_uses import require_cuttable
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import SHARD
from autograph_rewrite.ir.replace_op import replace_outputs
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize.whole_uses import (
    GATHERED,
    read_before_loops,
    read_whole_for_elements,
    write_whole_values,
)
from autograph_rewrite.passes.sharding.local_program import LocalProgram
from autograph_rewrite.passes.sharding.placements import ModelPlacements
from autograph_rewrite.passes.sharding.residence import owners_of, step_of
from autograph_rewrite.passes.sharding.shard_propagation import ShardedVariable, place
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.notes import stays_whole
from autograph_rewrite.plan.parts.residence import Sharded, placed, shard_name
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.model_axis import Round
from autograph_rewrite.training_graph import Shards, TrainingGraph, Variable

PASS = "shard-variables"


@dataclass(frozen=True)
class WholeVariables:
    """The item's variables as callers know them: a variable in shards is one of them."""

    variables: Mapping[str, Variable]


def shard_variables_of(graph: Graph, item: TrainingGraph, plan: Plan) -> tuple[TrainingGraph, Plan]:
    """Cut variables as the plan says; return the item, whose variables know their shards, and the request for these.

    Args:
        graph: a flat graph, which is edited; its anchors are the outputs of the item.

    Raises:
        GraphError: a variable cannot be cut.
    """
    cuts = _asked(plan)
    read = read_before_loops(graph, item, cuts)
    read_whole_for_elements(graph, item, cuts)
    state = propagate(graph, {}, Semantics())
    step = step_of(graph, item)
    # Only what is computed from gradients runs on servers: shards of an average would go to a worker and back.
    on_servers = any(cut.servers for cut in cuts.values())
    owners, whole = owners_of(item, state, step, cuts, averages=not on_servers)
    read += read_before_loops(graph, item, [name for name in owners if name not in cuts])
    write_whole_values(graph, item, owners)
    said = [GATHERED.format(*one) for one in read] + [stays_whole(*one) for one in whole.items()]
    plan = replace(plan, notes=(*plan.notes, *said))
    cuts = {name: cuts[owner] for name, owner in owners.items()}
    shards: dict[str, Shards] = {}
    for sizes, names in grouped((cut.sizes, name) for name, cut in cuts.items()).items():
        members = {
            graph.nodes[item.variables[name].handle]: _member(item.variables[name], cuts[name]) for name in names
        }
        for name in names:
            require_cuttable(name, graph.nodes[item.variables[name].handle], set(members))
        if state.edits != graph.edits:
            state = revise(state)
            step = step_of(graph, item)
        shares = place(state, members, step)
        if shares.means:
            for node, count in shares.means.items():
                _divide_sum(graph, node, count)
            state = revise(state)
            shares = place(state, members, step_of(graph, item))
        by_handle = {graph.nodes[item.variables[name].handle]: name for name in names}
        found = ModelPlacements(shares.propagation, state, members, shares.gradients, by_handle)
        unrolled = LocalProgram(found, Round(sum(sizes), sizes), axis=SHARD, alike=False).unrolled(item.targets)
        for handle, name in by_handle.items():
            handles = tuple(one.name for one in unrolled.clones[handle])
            shards[name] = Shards(cuts[name].axis, sizes, handles, cuts[name].servers)
    return in_shards(graph, item, plan, shards, cuts, owners)


def in_shards(
    graph: Graph,
    item: TrainingGraph,
    plan: Plan,
    shards: Mapping[str, Shards],
    cuts: Mapping[str, Sharded],
    owners: Mapping[str, str],
) -> tuple[TrainingGraph, Plan]:
    """Return an item whose variables say how they were cut, and a request for each shard instead of theirs.

    Args:
        shards: of each variable that was cut.
        owners: as `Owners.of`: the variables whose requests the shards follow.
    """
    variables = {
        name: replace(variable, handle=shards[name].handles[0], shards=shards[name]) if name in shards else variable
        for name, variable in item.variables.items()
    }
    return replace(item, source=graph, variables=variables), _with_shards(plan, cuts, owners)


def _divide_sum(graph: Graph, mean: Node, count: int) -> None:
    """Replace a mean by a sum, to which each shard contributes, divided by the number of all elements."""
    build = Builder.at(mean)
    total = build.op("Sum", *mean.inputs, what="sum", keep_dims=bool(mean.attr("keep_dims")))
    share = build.op("RealDiv", total, build.const(count, total.dtype, "count"), what="mean")
    replace_outputs(graph, mean, {0: share})


def by_shards(reduced: Iterable[Value], outputs: Collection[Value]) -> set[Value]:
    """Return the values to reduce; a gradient that is only cut into shards is replaced by the pieces.

    Each piece is then sent only to the place where its shard lives.
    """
    found: set[Value] = set()
    for value in reduced:
        readers = {node for node, _ in value.uses}
        made_here = all(node.op == "SplitV" and node.attr(PASS_ATTR) == PASS.encode() for node in readers)
        if readers and made_here and value not in outputs:
            found.update(piece for node in readers for piece in node.outputs)
        else:
            found.add(value)
    return found


def _member(variable: Variable, cut: Sharded) -> ShardedVariable:
    shape = variable.shape
    if shape is None or None in shape:
        problem = f"'{variable.name}' cannot be cut into shards: its shape is not known"
        raise GraphError(problem, hint="leave it whole")
    return ShardedVariable(tuple(dim for dim in shape if dim is not None), cut.axis)


def _with_shards(plan: Plan, cuts: Mapping[str, Sharded], owners: Mapping[str, str]) -> Plan:
    """Return the plan with a request for each shard instead of those for variables that are cut."""
    requests = [request for request in plan.variables if request.name not in owners]
    known = {request.name: request for request in plan.variables}
    for name, owner in owners.items():
        base = known.get(name) or known.get(owner) or VariableRequest(name, options=plan.default)
        for k in range(len(cuts[name].sizes)):
            requests.append(placed(replace(base, name=shard_name(name, k)), cuts[name].of_shard(k)))
    return replace(plan, variables=tuple(requests))


def _asked(plan: Plan) -> dict[str, Sharded]:
    """Return how variables are cut into shards; those that are split over the replicas stay one node (`residence`)."""
    placed = plan.has_shards_of_replicas
    cuts = {name: one for name, one in plan.residences.items() if isinstance(one, Sharded)}
    return {name: one for name, one in cuts.items() if not (placed and one.stage)}


def _shard(rewrite: Rewrite) -> None:
    """Shard variables, their slots and their updates."""
    known = rewrite.get(WholeVariables).variables if rewrite.has(WholeVariables) else rewrite.item.variables
    item, rewrite.plan = shard_variables_of(rewrite.graph, rewrite.item, rewrite.plan)
    rewrite.put(WholeVariables(in_pieces(known, item.variables)))  # the model axis may have cut others
    rewrite.item = replace(item, variables=shard_variables(item.variables))


SHARD_VARIABLES = Pass("shard-variables", _shard, lambda rewrite: bool(_asked(rewrite.plan)), gives=(WholeVariables,))


# Find the pieces of variables that were cut, once or axis by axis.
#
#     w [4, 6]    axis 0: rows 2 2       w/part_0, w/part_1
#                 axis 1: columns 3 3    w/part_0/part_0, w/part_0/part_1, w/part_1/part_0, w/part_1/part_1
#
# Each axis of a mesh cuts the pieces of the axis before it.


def pieces_of(variable: Variable) -> Iterator[Variable]:
    """Yield the variables that a graph has for one that may be cut: the smallest pieces, or itself."""
    if variable.shards is None:
        yield variable
        return
    for piece in _cut_once(variable, variable.shards):
        yield from pieces_of(piece)


def _cut_once(variable: Variable, shards: Shards) -> Iterator[Variable]:
    cut, first = Sharded(shards.axis, shards.sizes), 0
    for k, within in enumerate(shards.within or (None,) * len(shards.sizes)):
        handles = shards.handles[first : first + (1 if within is None else within.count)]
        first += len(handles)
        again = None if within is None else replace(within, handles=handles)
        shape = cut.shape(variable.shape or (), k)
        yield replace(variable, name=shard_name(variable.name, k), handle=handles[0], shape=shape, shards=again)


def shard_variables(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables of the graph itself: the pieces of those that were cut, and the others."""
    return {piece.name: piece for variable in variables.values() for piece in pieces_of(variable)}


def in_pieces(variables: Mapping[str, Variable], pieces: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return variables whose pieces may have been cut again.

    Args:
        variables: before that.
        pieces: the result of `shard_variables`, in which some are cut since.
    """
    return {name: _joined(one, pieces) for name, one in variables.items()}


def _joined(variable: Variable, pieces: Mapping[str, Variable]) -> Variable:
    if variable.shards is None:
        return pieces[variable.name]
    parts = [_joined(piece, pieces) for piece in _cut_once(variable, variable.shards)]
    handles = tuple(handle for part in parts for handle in (part.shards.handles if part.shards else (part.handle,)))
    within = tuple(part.shards and replace(part.shards, handles=(), devices=()) for part in parts)
    shards = replace(variable.shards, handles=handles, within=within if any(within) else ())
    return replace(variable, handle=handles[0], shards=shards)
