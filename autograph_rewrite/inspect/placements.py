"""Placements of the values of a rewrite under way, for who looks on: `opt`, snapshots."""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.format.annotations import Annotation, annotation
from autograph_rewrite.passes.base.rewriting import Rewrite


def placements_of(rewrite: Rewrite) -> dict[str, Annotation]:
    """Return the placements of the values of a rewrite that propagation has reached; none before `propagate`."""
    if not rewrite.has(Propagation):
        return {}
    state = rewrite.get(Propagation)
    found: dict[str, Annotation] = {}
    for node in rewrite.graph:
        if node in state.transfers:
            values = [node.output(i) for i in range(len(state.transfers[node].outputs))]
            for value in values:
                made, seen = rewrite.fact(value), state.facts[value]
                found[value.name] = annotation(
                    made.placement, seen.placement, others=made.others, seen_others=seen.others
                )
    for value, placement in rewrite.converted.items():
        if rewrite.graph.nodes.get(value.node.name) is value.node:
            found[value.name] = annotation(placement, placement)
    return found
