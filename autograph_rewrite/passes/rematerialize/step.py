"""The pass `rematerialize`: choose the nodes to recompute by the plan's policy, and insert their copies.

It runs on the folded graph before `resolve-plan`, where every value has its placement and nothing is converted yet:
copies are ordinary nodes from then on, which every replica and micro-batch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autograph_rewrite.analysis.empty_lists import future_splits
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.rematerialize.rewrite import rematerialize
from autograph_rewrite.plan.parts.messages import STEP, Remat
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import reshard_edges
from autograph_rewrite.resolve.remat.activations import Activations, find_activations
from autograph_rewrite.resolve.remat.budget import choose
from autograph_rewrite.resolve.remat.decide import nested_segments, segments_of
from autograph_rewrite.resolve.remat.decision import Decision, Left, Peaks, Segment
from autograph_rewrite.resolve.remat.policies import by_stage, nested_parts, parts_of
from autograph_rewrite.resolve.remat.step_memory import Step, StepMemory, variable_bytes
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.resolve.stages.assignment import forward_stages
from autograph_rewrite.resolve.stages.forward_backward import forward_nodes
from autograph_rewrite.resolve.wire_types import sizes_of

STATED = ("names", "collection", "scopes", "marked")
"""Policies that say themselves what is computed again."""
NOTHING = "nothing is computed again: no gradient reads what this policy would compute again, or all of them at once"
FITS = "nothing is computed again: a step takes {peak:,} B on a device as it is, and {limit:,} B are allowed"
ASSUMED = "the graph does not say how large the batch is: for the budget it is taken to have {batch} examples in all"


def recompute(rewrite: Rewrite, remat: Remat) -> tuple[Decision, Propagation]:
    """Edit the graph as `remat` says; return what is computed again, and the placements as they are then.

    Raises:
        PlanError: the plan names what the graph does not have, nothing tells the loss from its gradients, or no step
            fits the budget.
    """
    state, graph = rewrite.get(Propagation), rewrite.graph
    sizes = sizes_of(rewrite.job, state, rewrite.request.batch)
    resolved = reshard_edges.resolve_edges(rewrite.plan, state, rewrite.outputs, rewrite.item.variables, sizes)
    trained = [graph.value(edge.value).node for edge in resolved.edges if edge.owner != STEP]
    if remat.policy == "marked" and not trained:
        return Decision(), state
    try:
        forward = forward_nodes(resolved, state, rewrite.outputs)
    except PlanError as error:
        if remat.policy != "marked":  # nobody has asked for it in this configuration
            raise
        return Decision(left=(Left("recompute_grad", f"all of it is kept: {error.problem}"),)), state
    exchanged = [graph.value(edge.value) for edge in resolved.edges]
    acts = find_activations(state, forward, trained, exchanged)
    if remat.limit is not None:
        return _within(rewrite, acts, resolved, remat)
    parts, inner = parts_of(acts, remat), nested_parts(acts, remat)
    if resolved.pipeline is not None:
        stages = _stages(acts, resolved)
        parts, inner = (by_stage(one, stages, remat.stages) for one in (parts, inner))
    segments, wasted = segments_of(acts, parts, only_saving=remat.policy not in STATED)
    segments = [replace(one, inside=tuple(nested_segments(acts, one, inner))) for one in segments]
    decision, state = rematerialize(acts, segments)
    left = _first_of_each((*wasted, *decision.left))
    if not decision.segments:
        left = (*left, Left("remat.policy", NOTHING))
    return replace(decision, left=left), state


def _stages(acts: Activations, resolved: Plan) -> dict[Node, int]:
    """Return the stages that the forward will be divided into."""
    state, lists = acts.state, future_splits(acts.state)
    each = [node for node in acts.forward if node.op != "Const" and differs_by_replica(state, node, lists)]
    return forward_stages(resolved, state, each)


def _within(rewrite: Rewrite, acts: Activations, resolved: Plan, remat: Remat) -> tuple[Decision, Propagation]:
    """Compute as little again as lets a step fit."""
    assert remat.limit is not None
    step = step_of(rewrite, acts.state, resolved)
    memory = StepMemory(acts, step)
    choice = choose(acts, memory, remat.limit, remat.policy)
    decision, state = rematerialize(acts, choice.segments)
    batch = step.sizes.batch
    peaks = Peaks(remat.limit, memory.peak(()), _peak(rewrite, memory, decision.segments, remat.limit), batch)
    left = _first_of_each((*choice.left, *decision.left))
    if not choice.segments:
        left = (*left, Left("remat.policy", FITS.format(peak=peaks.before, limit=remat.limit)))
    if not (acts.state.semantics.batch or rewrite.request.batch):
        left = (*left, Left("remat.policy", ASSUMED.format(batch=batch)))
    return replace(decision, left=left, peaks=peaks), state


def _peak(rewrite: Rewrite, memory: StepMemory, done: Sequence[Segment], limit: int) -> int:
    """Return the peak with what could be computed again.

    Raises:
        PlanError: something could not wait for any gradient, so that it is kept, and there is no room for it.
    """
    nodes = rewrite.graph.nodes
    peak = memory.peak([[nodes[name] for name in segment.nodes] for segment in done])
    if peak > limit:
        raise PlanError(
            f"remat.policy: with what can wait for a gradient computed again, a step takes {peak:,} B on a device, and "
            f"{limit:,} B are allowed",
            hint="allow more, or divide the batch by more micro-batches or replicas",
        )
    return peak


def step_of(rewrite: Rewrite, state: Propagation, resolved: Plan) -> Step:
    """Return what a device runs in one step, for its memory.

    Args:
        rewrite: under way.
        state: the placements.
        resolved: the plan with its edges.
    """
    plan, outputs = rewrite.plan, rewrite.outputs
    sizes = sizes_of(rewrite.job, state, rewrite.request.batch)
    kept = variable_bytes(plan, rewrite.item.variables)
    if plan.microbatches > 1:  # each gradient has a sum beside it
        owned = [rewrite.graph.value(edge.value) for edge in resolved.edges if edge.owner != STEP]
        kept += sum(sizes.nbytes(state.source(value)) for value in dict.fromkeys(owned))
    roots = (*rewrite.targets, *(value.node for value in outputs))
    return Step(tuple(dict.fromkeys(roots)), frozenset(outputs), sizes, kept)


def _first_of_each(left: Sequence[Left]) -> tuple[Left, ...]:
    """Return one of those with one reason, with how many more there are."""
    found: dict[str, list[Left]] = {}
    for one in left:
        found.setdefault(one.reason, []).append(one)
    more = {reason: f" (and {len(same) - 1} more such segments)" for reason, same in found.items() if len(same) > 1}
    return tuple(Left(same[0].node, reason + more.get(reason, "")) for reason, same in found.items())
