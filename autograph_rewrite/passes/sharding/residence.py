"""Place variables that are split over the replicas, by the placement of their handles.

    before   w ──► read ──► MatMul, ..., MatMul                ResourceApplyAdam(w, m, v, dw)
    after    w: split(0), 3 rows and 2                         dw ──► ar.reshard: split(0) ──► ResourceApplyAdam
             read: split(0) ──► ar.reshard: replicated ──► MatMul, and once more for the backward part

Propagation finds the rest: a read has the placement of its variable, an update takes its shard of its operands, and an
optimizer computes elementwise ops on shards. Other parts of a step read the whole. So a variable stays one node, and so
do its slots and its update, on any number of replicas.

The whole is gathered before each use, and again before a later one, so that it can be freed in between. A reader is
later if it depends on another reader of the same whole: in training, the backward part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, propagate
from autograph_rewrite.analysis.variable_uses import obstacle, require_cuttable, variable_uses
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import REPLICA
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors, dependencies, marks_before, reachable, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import RESHARD, SHARD_ALIKE
from autograph_rewrite.ir.value import Use
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES, Sizes
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import shard_symbol
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize.whole_uses import use_whole
from autograph_rewrite.passes.sharding.shard_propagation import gradients_of, is_of_updates
from autograph_rewrite.plan.parts import residence
from autograph_rewrite.plan.parts.notes import stays_whole
from autograph_rewrite.plan.parts.residence import Sharded, names_of_wholes
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.batch import batch_facts
from autograph_rewrite.training_graph import TrainingGraph, Variable


@dataclass(frozen=True)
class Residences:
    """The variables that are split over the replicas.

    Attributes:
        of: how each is cut, by name, with a size for each replica, which may be 0.
        facts: of their handles.
    """

    of: Mapping[str, Sharded] = field(default_factory=dict)
    facts: Mapping[Value, Fact] = field(default_factory=dict)


def split_over_replicas(rewrite: Rewrite) -> Mapping[str, Sharded]:
    """Return the variables that are split over the replicas, and how each is cut."""
    return rewrite.get(Residences).of if rewrite.has(Residences) else {}


def step_of(graph: Graph, item: TrainingGraph) -> set[Node]:
    """Return the nodes that one step runs."""
    roots = [graph.nodes[name] for name in item.targets if name in graph.nodes]
    return ancestors([*roots, *(value.node for value in graph.anchors.values())])


class Owners(NamedTuple):
    """The variables whose requests say how others are cut.

    Attributes:
        of: by the name of a variable: itself, or the variable whose slot it is.
        whole: the slots that cannot be cut, each with the reason.
    """

    of: dict[str, str]
    whole: dict[str, str]


def owners_of(
    item: TrainingGraph, state: Propagation, step: set[Node], asked: Collection[str], *, averages: bool = True
) -> Owners:
    """Find the slots of the `asked` variables, which are cut with them.

    Args:
        averages: of variables are cut with them, too.
    """
    found, whole = {name: name for name in asked}, {}
    for name, use in variable_uses(state, item.variables, step=step, owners=asked, averages=averages).items():
        if use.owner is None:
            continue
        # A slot that a loop writes stays whole: the update of each shard takes its rows of it.
        if (hindered := obstacle(use.handle, rewritten=True)) is not None:
            whole[name] = hindered.reason
        else:
            found[name] = use.owner
    return Owners({name: found[name] for name in item.variables if name in found}, whole)


def with_slots(item: TrainingGraph, state: Propagation, step: set[Node], cut: Mapping[str, int]) -> dict[str, int]:
    """Return the dimension along which each variable is cut, with slots cut like their variables.

    Args:
        item: has the variables.
        state: placements of the graph in which nothing is cut.
        step: the nodes that one step runs.
        cut: the dimension of each variable that is cut, by name.
    """
    owners = owners_of(item, state, step, cut).of
    return {name: cut[name] if name in cut else cut[owner] for name, owner in owners.items()}


SUMS_WHOLE = 1
"""The ZeRO stage in which every replica adds gradients up whole, and cuts its shard out of the sum."""
GATHERS_ON_USE = 3
"""The ZeRO stage in which a variable is gathered anew for each use."""


def place_variables(
    graph: Graph, item: TrainingGraph, plan: Plan, asked: Mapping[str, Sharded], batch: int | None = None
) -> tuple[Residences, list[str]]:
    """Insert reshards of variables to wholes and of gradients to shards; return where variables live, and notes.

    Args:
        graph: edited.
        asked: how variables are cut, without their slots.
        batch: examples of all replicas together, where the graph leaves that open.

    Raises:
        GraphError: a use of a variable is impossible with shards.
    """
    step = step_of(graph, item)
    owners, whole = owners_of(item, propagate(graph, {}, Semantics()), step, asked)
    chosen = {name: asked[owner] for name, owner in owners.items()}
    said = [*use_whole(graph, item, chosen), *(stays_whole(*one) for one in whole.items())]
    padded = {
        name: replace(cut, sizes=(*cut.sizes, *[0] * (plan.replicas - len(cut.sizes)))) for name, cut in chosen.items()
    }
    handles = {graph.nodes[item.variables[name].handle]: name for name in chosen}
    for node, name in handles.items():
        require_cuttable(name, node, handles.keys())
    apart = {one.variable for one in plan.policies if not one.declared}
    kept = (one for name, one in item.variables.items() if not apart.isdisjoint(names_of_wholes(name)))
    by_policy = {graph.nodes[one.handle] for one in kept if one.handle in graph.nodes}
    cuts = {node: padded[name] for node, name in handles.items()}
    state = propagate(graph, {}, Semantics(), given=batch_facts(graph, item, plan))
    sizes = Sizes(plan.batch or batch or EXAMPLES * plan.replicas, plan.replicas)
    asks = _Asks(state, step, cuts, by_policy - handles.keys(), sizes, plan)
    asks.for_shards(item.variables, handles)
    wholes = [whole for node, name in handles.items() for whole in asks.for_wholes(node, item.variables[name])]
    if not plan.looped:  # a gather cannot wait for a value of a loop and be read in that loop
        gather_on_use(graph, wholes)
    facts = {node.output(): _fact(padded[name], item.variables[name]) for node, name in handles.items()}
    return Residences(padded, facts), said


def _fact(cut: Sharded, variable: Variable) -> Fact:
    shape = variable.shape or ()
    return Fact(split(cut.axis), dtypes.RESOURCE, (*shape[: cut.axis], shard_symbol(cut.sizes), *shape[cut.axis + 1 :]))


class _Asks:
    """Adds reshards to the whole of a value, or to shards of it.

    Args:
        state: placements of the graph in which nothing is split.
        step: the nodes that one step runs.
        cuts: the variables, by the node that gives the handle.
        apart: handles of variables that each replica updates with its contribution, which is no shard of a sum.
        sizes: of the whole batch.
        plan: says how often a step gathers a whole for one reader.
    """

    def __init__(
        self,
        state: Propagation,
        step: set[Node],
        cuts: Mapping[Node, Sharded],
        apart: Collection[Node],
        sizes: Sizes,
        plan: Plan,
    ) -> None:
        self._state, self._cuts, self._apart, self._sizes = state, cuts, apart, sizes
        self._times = plan.microbatches if plan.gathers_for_each else 1
        self._in_blocks = plan.model is not None  # rows of a handle's blocks are found by lookups of the handle
        writes = [node for node in state.order if node in step and has(node.op, "writes")]
        updates = [node for node in writes if handle_node(node.inputs[0]) not in apart]
        self._updates = [node for node in updates if handle_node(node.inputs[0]) in cuts]
        self._behind = reachable(updates, dependencies)
        self._before: Collection[Node] = ()

    def for_shards(self, variables: Mapping[str, Variable], handles: Mapping[Node, str]) -> None:
        """Let updates read shards of the whole gradients."""
        found: dict[Value, Sharded] = {}
        for node in self._updates:
            handle = handle_node(node.inputs[0])
            shape = tuple(dim for dim in variables[handles[handle]].shape or () if dim is not None)
            for value in gradients_of(self._state, node, shape):
                found.setdefault(value, self._cuts[handle])
        self._before = reachable((value.node for value in found), dependencies)
        for value, cut in found.items():
            uses = [use for use in value.uses if self._is_of_update(use.node)]
            if uses and cut.stage == SUMS_WHOLE:
                value = _ask(value, "sum", uses, Placement("partial", op="sum"), REPLICATED)
            if uses:
                dim = {"dim": cut.axis, "shards": list(cut.sizes)}
                _ask(value, "block", uses, REPLICATED, split(cut.axis), **dim)

    def for_wholes(self, handle: Node, variable: Variable) -> list[Node]:
        """Let all but the update read the whole of a variable; return the gathers to repeat for each use."""
        cut, found = self._cuts[handle], []
        for node, _ in list(handle_uses(handle)):
            if node.op == "ResourceGather" and self._takes_less(variable, node) and not self._in_blocks:
                _read_table(node)
        for node, _ in list(handle_uses(handle)):
            if node.op == "VariableShape":
                shape = np.asarray(variable.shape, dtypes.numpy_dtype(node.output_dtypes[0]))
                become(node, "Const", (), {"dtype": node.output_dtypes[0], "value": shape})
            elif has(node.op, "reads_rows"):
                self._find_rows(node)
            elif has(node.op, "reads_whole"):
                node.drop_attr("_output_shapes")  # they are those of the whole
                value, anchors = node.output(), node.graph.anchors.values()
                uses = [use for use in value.uses if not self._is_of_update(use.node)]
                firsts = [use for use in uses if not cut.axis and use.index == 0]
                few = [use for use in firsts if not self._takes_less(variable, use.node)]
                lookups = [use for use in few if self._looks_rows_up(use.node)]
                for use in lookups:
                    self._find_rows(use.node)
                uses = [use for use in uses if use not in lookups]
                if uses or value in anchors:
                    whole = _ask(value, "whole", uses, split(cut.axis), REPLICATED)
                    node.graph.move_anchors(value, whole)
                    found += [whole.node] if cut.stage == GATHERS_ON_USE else []
        return found

    def _looks_rows_up(self, node: Node) -> bool:
        """Return whether an op looks up rows of a table by their numbers, as `ResourceGather` does in a variable."""
        is_gather = node.op == "GatherV2" and not node.attr("batch_dims", 0)
        is_number = node.output_dtypes[0] in dtypes.INEXACT | dtypes.INTEGER
        return is_gather and is_number and self._state.facts[node.inputs[2]].value == (0,)

    def _takes_less(self, table: Variable, lookup: Node) -> bool:
        """Return whether the table to gather has no more bytes than all rows that the replicas look up in it.

        Each replica keeps all of these rows until they are added up, so the table takes no more memory either.
        """
        rows = self._state.facts.get(lookup.output())
        if rows is None or lookup in self._state.looped:
            return False
        return table.nbytes * self._times <= self._sizes.nbytes(rows)

    def _find_rows(self, node: Node) -> None:
        """Give each replica the rows that it looks up, out of the rows that all replicas find together."""
        found, anchors = node.output(), node.graph.anchors.values()
        uses = list(found.uses)
        if uses or found in anchors:
            made = Builder.at(node).op(SHARD_ALIKE, found, node.inputs[1], what="rows")
            node.graph.move_anchors(found, made)
            for use in uses:
                use.node.set_input(use.index, made)

    def _is_of_update(self, node: Node) -> bool:
        """Return whether a node is a part of an update: it is after the gradients, and works on elements."""
        if has(node.op, "writes"):
            return handle_node(node.inputs[0]) not in self._apart
        return node in self._behind and node not in self._before and is_of_updates(node)


def _read_table(lookup: Node) -> None:
    """Let a lookup take rows from the value of a variable, instead of its handle."""
    handle, ids = lookup.inputs
    dims, dtype, build = lookup.attr("batch_dims", 0), lookup.output_dtypes[0], Builder.at(lookup)
    table = build.op("ReadVariableOp", handle, what="table", controls=lookup.controls, dtype=dtype)
    types = {"Tparams": dtype, "Tindices": ids.dtype, "Taxis": dtypes.INT32}
    become(lookup, "GatherV2", (table, ids, build.const(dims, dtypes.INT32, "axis")), {**types, "batch_dims": dims})


def _ask(value: Value, what: str, uses: Iterable[Use], before: Placement, after: Placement, **attrs: Any) -> Value:
    """Let some uses of a value read it in another placement."""
    made = Builder.at(value.node).op(
        RESHARD, value, what=what, over=[REPLICA], before=repr(before), after=repr(after), **attrs
    )
    for use in uses:
        use.node.set_input(use.index, made)
    return made


def gather_on_use(graph: Graph, wholes: Sequence[Node]) -> int:
    """Delay the gathers of variables until they are used, and add one for each later reader; return their number.

    A gather for a reader waits for the reader's other operands.

    Args:
        wholes: the gathers.
    """
    gathers = set(wholes)
    readers = {reader: None for whole in wholes for reader, _ in whole.output().uses}
    marks = {node: 1 << i for i, node in enumerate(readers)}
    before = marks_before(topological_order(graph), marks)
    count = 0
    for whole in wholes:
        uses = whole.output().uses
        mine = sum({marks[reader] for reader, _ in uses})

        def seen(reader: Node) -> int:
            return reduce(or_, (before[n] | marks.get(n, 0) for n in _awaited(reader, gathers)), 0)

        later = [use for use in uses if seen(use.node) & mine]
        for reader, index in later:
            read, how = whole.inputs[0], {key: whole.attr(key) for key in ("over", "before", "after")}
            build = Builder(graph, f"{read.node.name}/again", whole)
            again = build.node(RESHARD, read, controls=_awaited(reader, gathers), **how)
            gathers.add(again)
            reader.set_input(index, again.output())
            count += 1
        first = {reader for reader, _ in uses} - {reader for reader, _ in later}
        if len(first) == 1 and not any(value.node is whole for value in graph.anchors.values()):
            for node in _awaited(first.pop(), gathers):  # with one reader, this closes no cycle
                whole.add_control(node)
    return count


def _awaited(reader: Node, gathers: Collection[Node]) -> list[Node]:
    """Return the nodes that a gather for a reader waits for: its operands, without constants and gathers.

    Otherwise two gathers for one reader would wait for each other.
    """
    nodes = dict.fromkeys(value.node for value in reader.inputs)
    return [node for node in nodes if node not in gathers and not has(node.op, "constants")]


def _place(rewrite: Rewrite) -> None:
    """Place variables that are split over the replicas, and insert reshards to wholes and shards of them."""
    plan = rewrite.plan
    found, said = place_variables(rewrite.graph, rewrite.item, plan, _asked(rewrite), rewrite.request.batch)
    rewrite.put(found)
    requests = (
        replace(residence.placed(one, residence.REPLICATED), server=None, stage=one.stage) if one.stage else one
        for one in plan.variables
    )
    rewrite.plan = replace(plan, variables=tuple(requests), notes=(*plan.notes, *said))


def _asked(rewrite: Rewrite) -> dict[str, Sharded]:
    if not rewrite.plan.has_shards_of_replicas:
        return {}
    return {name: one for name, one in rewrite.plan.residences.items() if isinstance(one, Sharded) and one.stage}


PLACE_VARIABLES = Pass("place-variables", _place, lambda rewrite: bool(_asked(rewrite)), gives=(Residences,))
