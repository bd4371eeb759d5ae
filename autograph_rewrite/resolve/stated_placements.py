"""Placements that a text states: found anew and compared, or taken as given where propagation does not run.

%dw: float32[3,4] @ split(0) = MatMul(...)      case.txt:7: propagation finds partial(sum)
%dw: float32[3,4] @ partial(sum) -> replicated  this sum is taken here, wherever else it could be
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation, propagate, revise
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import Annotation, Annotations, annotation
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ops.facts.placement import REPLICATED, Placement


def with_stated(state: Propagation, stated: Annotations) -> Propagation:
    """Return placements with the conversions that are stated, compared with all that is.

    Args:
        state: what was propagated.
        stated: by the names of values; a name that the graph lacks says nothing.

    Raises:
        GraphError: a statement and what propagation finds differ.
    """
    found = dict(_in(state.graph, stated))
    if converted := [value for value, one in found.items() if _is_converted(state, value, one)]:
        state = revise(state, reduced=converted)
    for value, one in found.items():
        if value in state.facts:
            _require_found(state, value, one)
    return state


def taken_as_given(state: Propagation, stated: Annotations) -> Propagation:
    """Return placements in which every statement holds, whatever the rules say, and the others follow from them.

    Args:
        state: what was propagated without them.
        stated: as for `with_stated`.

    Raises:
        GraphError: a batch input is stated not to be one, or a dimension is split that a value does not have.
    """
    found = dict(_in(state.graph, stated))
    given: dict[Value, Placement] = {}
    for value, one in found.items():
        if value in state.facts and value not in state.whole_inputs:
            _require_dimension(state, value, one)
            given[value] = one.placement
    reduced = [value for value, one in found.items() if _is_converted(state, value, one)]
    new = propagate(state.graph, state.whole_inputs, state.semantics, reduced=reduced, given=given, cache=state.cache)
    for value, one in found.items():
        if value in new.facts:
            _require_found(new, value, one)
    return new


def _in(graph: Graph, stated: Annotations) -> Iterator[tuple[Value, Annotation]]:
    """Yield the values that a graph has of those that something is stated of."""
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
