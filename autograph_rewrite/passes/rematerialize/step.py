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
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.rematerialize.loop_bodies import recompute_in_loops
from autograph_rewrite.passes.rematerialize.offload import offload
from autograph_rewrite.passes.rematerialize.rewrite import rematerialize
from autograph_rewrite.passes.rematerialize.within_budget import recompute_within
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.edges import reshard_edges
from autograph_rewrite.resolve.remat.activations import Activations, find_activations
from autograph_rewrite.resolve.remat.decide import nested_segments, segments_of
from autograph_rewrite.resolve.remat.decision import Decision, Left, first_of_each
from autograph_rewrite.resolve.remat.loops.cells import cells_of
from autograph_rewrite.resolve.remat.offloaded import values_to_offload
from autograph_rewrite.resolve.remat.policies import by_stage, parts_of
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.resolve.stages.assignment import forward_stages
from autograph_rewrite.resolve.stages.forward_backward import forward_nodes, trained_nodes
from autograph_rewrite.resolve.wire_types import sizes_of

STATED = ("names", "collection", "scopes", "marked")
"""Policies that say themselves what is computed again."""
ON_HOST = "nothing is offloaded: all devices are CPUs, whose memory is the host's"
SEVERAL = "nothing is offloaded: stages in several processes have several hosts"
MODEL_AXIS = "what its loop saves for the gradient is kept: cells are not computed again where a model axis cuts them"
NOTHING = "nothing is computed again: no gradient reads what this policy would compute again, or all of them at once"


def recompute(rewrite: Rewrite, remat: Remat) -> tuple[Decision, Propagation]:
    """Edit the graph as `remat` says; return what is computed again, and the placements as they are then.

    Raises:
        PlanError: the plan names what the graph does not have, nothing tells the loss from its gradients, or no step
            fits the budget.
    """
    state, graph = rewrite.get(Propagation), rewrite.graph
    sizes = sizes_of(rewrite.job, state, rewrite.request.batch)
    resolved = reshard_edges.resolve_edges(rewrite.plan, state, rewrite.outputs, rewrite.item.variables, sizes)
    trained = trained_nodes(resolved, state)
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
        decision, state = recompute_within(rewrite, acts, resolved, remat)
    else:
        decision, state = _by_policy(acts, resolved, remat)
        if remat.policy != "none":
            decision, state = _in_loops(rewrite, replace(acts, state=state), decision, remat, exchanged)
    return _offload(rewrite, replace(acts, state=state), decision, remat) if remat.offload else (decision, state)


def _by_policy(acts: Activations, resolved: Plan, remat: Remat) -> tuple[Decision, Propagation]:
    """Compute again what the policy says."""
    parts, inner = parts_of(acts, remat)
    if resolved.pipeline is not None:
        stages = _stages(acts, resolved)
        parts, inner = (by_stage(one, stages, remat.stages) for one in (parts, inner))
    segments, wasted = segments_of(acts, parts, only_saving=remat.policy not in STATED)
    segments = [replace(one, inside=tuple(nested_segments(acts, one, inner))) for one in segments]
    decision, state = rematerialize(acts, segments)
    left = first_of_each((*wasted, *decision.left))
    if not decision.segments and remat.policy != "none":
        left = (*left, Left("remat.policy", NOTHING))
    return replace(decision, left=left), state


def _in_loops(
    rewrite: Rewrite, acts: Activations, decision: Decision, remat: Remat, exchanged: Sequence[Value]
) -> tuple[Decision, Propagation]:
    """Compute cells of loops again."""
    cells, left = cells_of(acts, remat, exchanged)
    if cells and rewrite.plan.model is not None:
        cells, left = [], [*left, Left(cells[0].segment.nodes[0], MODEL_AXIS)]
    if not cells:
        return replace(decision, left=(*decision.left, *left)), acts.state
    state = recompute_in_loops(rewrite, acts, cells).state
    segments = (*decision.segments, *(cell.segment for cell in cells))
    reasons = tuple(one for one in (*decision.left, *left) if one.reason != NOTHING)
    return replace(decision, segments=segments, left=reasons), state


def _offload(rewrite: Rewrite, acts: Activations, decision: Decision, remat: Remat) -> tuple[Decision, Propagation]:
    """Move values to the host's memory, if that is another one."""
    plan = rewrite.plan
    if all(is_host(device) for device in plan.devices) or len(plan.stage_hosts) > 1:
        reason = SEVERAL if len(plan.stage_hosts) > 1 else ON_HOST
        return replace(decision, left=(*decision.left, Left("remat.offload", reason))), acts.state
    done, left, state = offload(acts, values_to_offload(acts, remat, decision.segments))
    return replace(decision, left=(*decision.left, *first_of_each(left)), offloaded=tuple(done)), state


def is_host(device: str) -> bool:
    """Return whether the memory of a device is the host's."""
    return parse(device).kind == "CPU"


def _stages(acts: Activations, resolved: Plan) -> dict[Node, int]:
    """Return the stages that the forward will be divided into."""
    state, lists = acts.state, future_splits(acts.state)
    each = [node for node in acts.forward if node.op != "Const" and differs_by_replica(state, node, lists)]
    return forward_stages(resolved, state, each)


def _run(rewrite: Rewrite) -> None:
    """Recompute activations for the gradients that need them, instead of keeping them (`remat`)."""
    assert rewrite.plan.remat is not None
    decision, state = recompute(rewrite, rewrite.plan.remat)
    rewrite.put(decision)
    rewrite.put(state)


REMATERIALIZE = Pass(
    "rematerialize", _run, lambda rewrite: rewrite.plan.remat is not None, (Propagation,), (Propagation, Decision)
)
