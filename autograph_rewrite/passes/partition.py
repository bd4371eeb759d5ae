"""Cut variables into shards, before anything else looks at the graph.

    before   w: split(0), sizes 3 2     read(w) ──► MatMul      ResourceApplyAdam(w, m, v, dw)
    after    w/part_0: 3 rows           concat(reads) ──► MatMul
             w/part_1: 2 rows           ResourceApplyAdam(w/part_k, m/part_k, v/part_k, dw/shards:k)

What comes behind sees ordinary variables: their gradients are reduced, compressed and placed one by one. A variable's
slots are cut with it. Initial values are made once and cut; a checkpoint holds the whole, since what saves reads the
whole, and what restores is an update of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation, propagate, revise
from autograph_rewrite.analysis.rules.base import Semantics
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.frames import frames_of
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.resources import updates
from autograph_rewrite.ir.walk import ancestors
from autograph_rewrite.item import GraphItem, Shards, Variable
from autograph_rewrite.passes.partition_again import gather_on_use
from autograph_rewrite.passes.partition_place import Member, place
from autograph_rewrite.passes.partition_slots import slots_of
from autograph_rewrite.passes.partition_uses import Uses, require_cuttable
from autograph_rewrite.plan.parts import VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.shards import Cut, cut_of, shard_name

PASS = "shard-variables"


def partition(graph: Graph, item: GraphItem, plan: Plan) -> tuple[GraphItem, Plan]:
    """Cut the variables of which the plan wants it; return the item and the request with shards instead of them.

    Args:
        graph: a flat graph, which is edited; the outputs of the item are its anchors.
        item: the item; its variables say what was cut, in `shards`.
        plan: the request.

    Raises:
        GraphError: a variable cannot be cut.
    """
    asked = {request.name: request for request in plan.variables if cut_of(request) is not None}
    if not asked:
        return item, plan
    state = propagate(graph, {}, Semantics())
    step = _step(graph, item)
    owners = _owners(graph, item, state, step, asked)
    cuts = {name: cut for name, owner in owners.items() if (cut := cut_of(asked[owner])) is not None}
    shards: dict[str, Shards] = {}
    for sizes, names in _by_sizes(cuts).items():
        members = {
            graph.nodes[item.variables[name].handle]: _member(item.variables[name], cuts[name]) for name in names
        }
        for name in names:
            require_cuttable(name, graph.nodes[item.variables[name].handle], set(members))
        if state.edits != graph.edits:
            state = revise(state)
            step = _step(graph, item)
        looped = set(frames_of(state.order))
        by_handle = {graph.nodes[item.variables[name].handle]: name for name in names}
        uses = Uses(graph, place(state, members, step, looped), sizes, by_handle)
        uses.run()
        for handle, made in uses.handles.items():
            name = by_handle[handle]
            servers = asked[owners[name]].servers
            shards[name] = Shards(cuts[name].axis, sizes, tuple(node.name for node in made), servers)
    again = [shards[name].handles[0] for name, owner in owners.items() if asked[owner].stage == 3]
    gather_on_use(graph, [graph.nodes[handle] for handle in again])
    variables = {
        name: replace(variable, handle=shards[name].handles[0], shards=shards[name]) if name in shards else variable
        for name, variable in item.variables.items()
    }
    return item.with_(graph=graph, variables=variables), _with_shards(plan, asked, owners)


def shard_variables(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables that the graph really has: the shards of those that were cut, and the others."""
    found: dict[str, Variable] = {}
    for name, variable in variables.items():
        if variable.shards is None:
            found[name] = variable
            continue
        cut = Cut(variable.shards.axis, variable.shards.sizes)
        for k, handle in enumerate(variable.shards.handles):
            shape = cut.shape(variable.shape or (), k)
            shard = replace(variable, name=shard_name(name, k), handle=handle, shape=shape, shards=None)
            found[shard.name] = shard
    return found


def by_shards(reduced: Iterable[Value], outputs: Collection[Value]) -> set[Value]:
    """Return the values to reduce with gradients that are only cut into shards replaced by the pieces.

    Each piece can then go where its shard lives, and no further.
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


def _step(graph: Graph, item: GraphItem) -> set[Node]:
    roots = [graph.nodes[name] for name in item.targets if name in graph.nodes]
    return ancestors([*roots, *(value.node for value in graph.anchors.values())])


def _owners(
    graph: Graph, item: GraphItem, state: Propagation, step: set[Node], asked: Mapping[str, VariableRequest]
) -> dict[str, str]:
    """Return for each variable that is cut the one whose request says how: itself, or the one that it is a slot of."""
    variables = {graph.nodes[v.handle]: v for v in item.variables.values() if v.handle in graph.nodes}
    by_handle = updates(node for node in state.order if node in step)
    taken = {handle for handle, variable in variables.items() if variable.name in asked}
    found = {name: name for name in asked}
    for handle, variable in variables.items():
        if variable.name in asked:
            for slot in slots_of(state, handle, variables, by_handle, taken):
                found.setdefault(variables[slot].name, variable.name)
    return {name: found[name] for name in item.variables if name in found}


def _by_sizes(cuts: Mapping[str, Cut]) -> dict[tuple[int, ...], list[str]]:
    found: dict[tuple[int, ...], list[str]] = {}
    for name, cut in cuts.items():
        found.setdefault(cut.sizes, []).append(name)
    return found


def _member(variable: Variable, cut: Cut) -> Member:
    shape = variable.shape
    if shape is None or None in shape:
        problem = f"'{variable.name}' cannot be cut into shards: its shape is not known"
        raise GraphError(problem, hint="leave it whole")
    return Member(tuple(dim for dim in shape if dim is not None), cut.axis)


def _with_shards(plan: Plan, asked: Mapping[str, VariableRequest], owners: Mapping[str, str]) -> Plan:
    """Return the plan with a request for each shard instead of those for variables that are cut."""
    requests = [request for request in plan.variables if request.name not in owners]
    known = {request.name: request for request in plan.variables}
    for name, owner in owners.items():
        servers = asked[owner].servers
        base = known.get(name, replace(asked[owner], name=name))
        for k in range(len(asked[owner].sizes)):
            server = servers[k : k + 1]
            placement = "single" if server else "replicated"
            shard = replace(base, name=shard_name(name, k), placement=placement, servers=server, sizes=(), stage=0)
            requests.append(shard)
    return replace(plan, variables=tuple(requests))
