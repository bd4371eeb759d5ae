"""Propagate placements through the graph of a rewrite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.batch_groups import batch_groups
from autograph_rewrite.analysis.propagate import NOTHING_GIVEN, Propagation, Stated, propagate, revise
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, annotation
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ops.facts.placement import REPLICATED, Extent, Placement
from autograph_rewrite.ops.facts.symbolic_dims import segments, unit
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.localize.localize_indices import mark_dynamic_partitions
from autograph_rewrite.passes.sharding.residence import Residences
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.batch import batch_values


def _propagate(rewrite: Rewrite) -> None:
    """Give every value its placement: replicated, split along a dimension, or partial (the replicas add up)."""
    state = _propagated(rewrite)
    rewrite.put(with_stated(state, rewrite.item.placements) if rewrite.item.placements else state)


def take_placements_as_given(rewrite: Rewrite) -> None:
    """Give values the placements that the item states, and propagate from these; only `opt` does so."""
    rewrite.put(taken_as_given(_propagated(rewrite), rewrite.item.placements))


def _propagated(rewrite: Rewrite) -> Propagation:
    mark_dynamic_partitions(rewrite.graph)
    batch, static = batch_values(rewrite.graph, rewrite.item, rewrite.plan)
    given = rewrite.get(Residences).facts if rewrite.has(Residences) else {}
    return propagate_parts(rewrite.graph, batch, static, rewrite.plan, given)


PROPAGATE = Pass("propagate", _propagate, gives=(Propagation,))


# Decide whether blocks may have segments: concatenated batch inputs must provably have one size.
#
#     concat([real, f(real)])              one input: yes
#     split(g(concat([one, two])), 2)      cut into equal parts again: two views of one batch
#     concat([real, f(noise)])             nothing says that there is as much noise as there is real data: whole
#
# Static sizes are known, and a job feeds all inputs alike. Elsewhere the runtime refuses sizes that must agree and do
# not (`runtime.engine.batch_sizes`), so propagation must not demand equal sizes where one device accepts unequal ones.


def propagate_parts(
    graph: Graph, batch: Mapping[Value, int], static: int | None, plan: Plan, given: Stated = NOTHING_GIVEN
) -> Propagation:
    """Propagate placements, with segments where blocks may have them.

    Args:
        batch: the split dimension of each batch input.
        static: number of examples of the batch, if known.
    """
    may_be = _are_possible(plan) and any(has(node.op, "concatenates") for node in graph)
    semantics = Semantics(plan.semantics.random, plan.semantics.batch_norm, Extent(units=static), segments=may_be)
    joined = propagate(graph, batch, semantics, given=given)
    if not may_be or len(batch) == 1 or static is not None or len(plan.processes) > 1:
        return joined
    if not any(fact.is_segmented for fact in joined.facts.values()):
        return joined
    apart = propagate(graph, batch, semantics._replace(segments=False), given=given)
    return joined if _groups(joined) == _groups(apart) or _is_cut_in_equal_parts(joined) else apart


def _are_possible(plan: Plan) -> bool:
    """Return whether any block may have segments.

    Micro-batches and stages cut blocks differently; local batch normalisation needs a block of consecutive rows.
    """
    return plan.microbatches == 1 and plan.pipeline is None and plan.semantics.batch_norm == "sync"


def _groups(state: Propagation) -> tuple[tuple[Value, ...], ...]:
    found = batch_groups(state)
    return (tuple(state.whole_inputs),) if found is None else found.groups


def _is_cut_in_equal_parts(state: Propagation) -> bool:
    """Return whether some Split cuts a block with segments into equal parts."""
    for node in state.order:
        if node.op == "Split" and segments(state.facts[node.inputs[1]].split_size):
            made = [fact.split_size for fact in state.transfers[node].outputs]
            if None not in map(unit, made) and len(set(made)) == 1:
                return True
    return False


# Placements that a text states: compared with those that propagation finds, or taken as given if it does not run.
#
# %dw: float32[3,4] @ split(0) = MatMul(...)      case.txt:7: propagation finds partial(sum)
# %dw: float32[3,4] @ partial(sum) -> replicated  this sum is taken here, wherever else it could be


def with_stated(state: Propagation, stated: Annotations) -> Propagation:
    """Add the stated conversions to placements, and compare the result with all statements.

    Args:
        stated: by the names of values; names that the graph lacks are ignored.

    Raises:
        GraphError: propagation finds another placement than is stated.
    """
    found = dict(_in(state.graph, stated))
    if converted := [value for value, one in found.items() if _is_converted(state, value, one)]:
        state = revise(state, reduced=converted)
    for value, one in found.items():
        if value in state.facts:
            _require_found(state, value, one)
    return state


def taken_as_given(state: Propagation, stated: Annotations) -> Propagation:
    """Propagate from the stated placements, whatever the rules say of these values.

    Args:
        state: placements propagated without the statements.

    Raises:
        GraphError: a statement contradicts a batch input, or splits a dimension that its value does not have.
    """
    found = dict(_in(state.graph, stated))
    given: dict[Value, Placement] = {}
    for value, one in found.items():
        if value in state.facts and value not in state.whole_inputs:
            _require_dimension(state, value, one)
            given[value] = one.placement
    reduced = {value: REPLICATED for value, one in found.items() if _is_converted(state, value, one)}
    new = propagate(state.graph, state.whole_inputs, state.semantics, reduced=reduced, given=given, cache=state.cache)
    for value, one in found.items():
        if value in new.facts:
            _require_found(new, value, one)
    return new


def _in(graph: Graph, stated: Annotations) -> Iterator[tuple[Value, Annotation]]:
    """Yield each stated value that the graph has, with its annotation."""
    for name, one in stated.items():
        node_name, _, index = name.partition(":")
        node = graph.nodes.get(node_name)
        if node is not None:
            yield node.output(int(index or 0)), one


def _is_converted(state: Propagation, value: Value, one: Annotation) -> bool:
    return one.readers == REPLICATED and value in state.facts


def _require_found(state: Propagation, value: Value, one: Annotation) -> None:
    found = annotation(state.source(value).placement, state.facts[value].placement)
    if (one.placement, one.readers) in ((found.placement, found.readers), (found.placement, None)):
        return
    raise GraphError(
        f"'%{value.name}' is stated to be {replace(one, span=None)}, and propagation finds {found}",
        node=value.node,
        where=one.where or None,
        hint="leave the placement out of the line, or run passes after 'propagate' only, which take it as given",
    )


def _require_dimension(state: Propagation, value: Value, one: Annotation) -> None:
    rank = state.facts[value].rank
    if one.placement.is_split and rank is not None and one.placement.dim >= rank:
        raise GraphError(
            f"'%{value.name}' has {rank} dimensions, so it cannot be {one.placement!r}",
            node=value.node,
            where=one.where or None,
            hint="count dimensions from 0",
        )
