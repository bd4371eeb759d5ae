"""Whether blocks may have segments: concatenated batch inputs must provably be of one size.

    concat([real, f(real)])              one input: yes
    split(g(concat([one, two])), 2)      cut into equal parts again: two views of one batch
    concat([real, f(noise)])             nothing says that there is as much noise as there is real data: whole

Static sizes are known, and a job feeds all inputs alike; elsewhere the runtime refuses sizes that meet and differ
(`runtime.session.batch_sizes`), so nothing that one device takes may be made to meet for want of a reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.analysis.batch_groups import batch_groups
from autograph_rewrite.analysis.propagate import Propagation, propagate
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ops.facts.symbolic_dims import segments, unit
from autograph_rewrite.ops.rules.base import Semantics
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.plan import Plan


def propagate_parts(graph: Graph, batch: Mapping[Value, int], static: int | None, plan: Plan) -> Propagation:
    """Propagate placements, with segments where there may be some.

    Args:
        graph: which is propagated.
        batch: its batch inputs.
        static: how many examples there are, where that is known.
        plan: the request.
    """
    may_be = _are_possible(plan) and any(has(node.op, "concatenates") for node in graph)
    semantics = Semantics(plan.semantics.random, plan.semantics.batch_norm, static, segments=may_be)
    joined = propagate(graph, batch, semantics)
    if not may_be or len(batch) == 1 or static is not None or len(plan.processes) > 1:
        return joined
    if not any(fact.is_segmented for fact in joined.facts.values()):
        return joined
    apart = propagate(graph, batch, semantics._replace(segments=False))
    return joined if _groups(joined) == _groups(apart) or _is_cut_in_equal_parts(joined) else apart


def _are_possible(plan: Plan) -> bool:
    """Micro-batches and stages go by blocks of their own; statistics of each block are those of following rows."""
    return plan.microbatches == 1 and plan.pipeline is None and plan.semantics.batch_norm == "sync"


def _groups(state: Propagation) -> tuple[tuple[Value, ...], ...]:
    found = batch_groups(state)
    return (tuple(state.whole_inputs),) if found is None else found.groups


def _is_cut_in_equal_parts(state: Propagation) -> bool:
    """Return whether segments are told apart by their number alone."""
    for node in state.order:
        if node.op == "Split" and segments(state.facts[node.inputs[1]].split_size):
            made = [fact.split_size for fact in state.transfers[node].outputs]
            if None not in map(unit, made) and len(set(made)) == 1:
                return True
    return False
