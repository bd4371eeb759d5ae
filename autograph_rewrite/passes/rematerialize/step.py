"""The pass `rematerialize`: choose the nodes to recompute by the plan's policy, and insert their copies.

It runs on the folded graph before `resolve-plan`, where every value has its placement and nothing is converted yet:
copies are ordinary nodes from then on, which every replica and micro-batch has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.item import Variable
from autograph_rewrite.passes.rematerialize.rewrite import rematerialize
from autograph_rewrite.plan.parts.messages import STEP, Remat
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import reshard_edges
from autograph_rewrite.resolve.remat.activations import find_activations
from autograph_rewrite.resolve.remat.decide import segments_of
from autograph_rewrite.resolve.remat.decision import Decision, Left
from autograph_rewrite.resolve.remat.policies import parts_of
from autograph_rewrite.resolve.stages.forward_backward import forward_nodes

STATED = ("names", "scopes")
"""Policies that say themselves what is computed again."""
NOTHING = "nothing is computed again: no gradient reads what this policy would compute again, or all of them at once"


def recompute(
    remat: Remat, state: Propagation, plan: Plan, outputs: Sequence[Value], variables: Mapping[str, Variable]
) -> tuple[Decision, Propagation]:
    """Edit the graph as `remat` says; return what is computed again, and the placements as they are then.

    Args:
        remat: what is asked.
        state: the placements.
        plan: the request.
        outputs: values that the outside reads.
        variables: of the item.

    Raises:
        PlanError: the plan names what the graph does not have, or nothing tells the loss from its gradients.
    """
    graph = state.graph
    resolved = reshard_edges.resolve_edges(plan, state, outputs, variables)
    trained = [graph.value(edge.value).node for edge in resolved.edges if edge.owner != STEP]
    exchanged = [graph.value(edge.value) for edge in resolved.edges]
    acts = find_activations(state, forward_nodes(resolved, state, outputs), trained, exchanged)
    segments, wasted = segments_of(acts, parts_of(acts, remat), only_saving=remat.policy not in STATED)
    decision, state = rematerialize(acts, segments)
    left = _first_of_each((*wasted, *decision.left))
    if not decision.segments:
        left = (*left, Left("remat.policy", NOTHING))
    return replace(decision, left=left), state


def _first_of_each(left: Sequence[Left]) -> tuple[Left, ...]:
    """Return one of those with one reason, with how many more there are."""
    found: dict[str, list[Left]] = {}
    for one in left:
        found.setdefault(one.reason, []).append(one)
    more = {reason: f" (and {len(same) - 1} more such segments)" for reason, same in found.items() if len(same) > 1}
    return tuple(Left(same[0].node, reason + more.get(reason, "")) for reason, same in found.items())
