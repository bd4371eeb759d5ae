"""The policy budget:SIZE as a pass: what a device, or each stage of a pipeline, holds; as little again as fits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.empty_lists import future_splits
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.variable_ops import handle_uses
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.rematerialize.loop_bodies import recompute_in_loops
from autograph_rewrite.passes.rematerialize.rewrite import rematerialize
from autograph_rewrite.plan.parts.messages import STEP, Remat
from autograph_rewrite.plan.parts.pipeline_schedule import ideal_in_flight
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.budget import choose
from autograph_rewrite.resolve.remat.decision import Decision, Left, Peaks, Segment
from autograph_rewrite.resolve.remat.loops.cells import Cell, cells_of
from autograph_rewrite.resolve.remat.stage_memory import StageNeeds, choose_by_stage, device_peaks
from autograph_rewrite.resolve.remat.step_memory import Step, StepMemory, variable_bytes
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.resolve.stages.assignment import backward_stages, forward_stages, gradients_of, owners_of
from autograph_rewrite.resolve.wire_types import sizes_of

FITS = "nothing is computed again: a step takes {peak:,} B on a device as it is, and {limit:,} B are allowed"
ASSUMED = "the graph does not say how large the batch is: for the budget it is taken to have {batch} examples in all"


def recompute_within(rewrite: Rewrite, acts: Activations, resolved: Plan, remat: Remat) -> tuple[Decision, Propagation]:
    """Compute as little again as lets a step fit.

    Args:
        rewrite: under way; its graph is edited.
        acts: what may be computed again.
        resolved: the plan with its edges.
        remat: with a limit.

    Raises:
        PlanError: no step fits.
    """
    assert remat.limit is not None
    step = step_of(rewrite, acts.state, resolved)
    fit = _fit_stages if resolved.pipeline is not None else _fit_device
    decision, state = fit(rewrite, acts, resolved, step)
    peaks = decision.peaks
    assert peaks is not None
    left = decision.left
    if not decision.segments and peaks.before <= remat.limit:
        left = (*left, Left("remat.policy", FITS.format(peak=peaks.before, limit=remat.limit)))
    if not (acts.state.semantics.batch or rewrite.request.batch):
        left = (*left, Left("remat.policy", ASSUMED.format(batch=step.sizes.batch)))
    return replace(decision, left=left), state


def _fit_device(rewrite: Rewrite, acts: Activations, resolved: Plan, step: Step) -> tuple[Decision, Propagation]:
    """Fit a device that has the whole model."""
    remat = resolved.remat
    assert remat is not None
    assert remat.limit is not None
    memory, cells = StepMemory(acts, step), list[Cell]()
    before = memory.peak(())
    try:
        choice = choose(acts, memory, remat.limit, remat.policy)
    except PlanError:  # with what loops save, nothing fits
        cells, _ = cells_of(acts, remat, [rewrite.graph.value(edge.value) for edge in resolved.edges])
        if not cells or rewrite.plan.model is not None:
            raise
        acts = recompute_in_loops(rewrite, acts, cells)
        memory = StepMemory(acts, step_of(rewrite, acts.state, resolved))
        choice = choose(acts, memory, remat.limit, remat.policy, before)
    decision, state = rematerialize(acts, choice.segments)
    after = memory.peak(_nodes(rewrite, decision.segments))
    _require_room(after, remat.limit)
    peaks = Peaks(remat.limit, before, after, step.sizes.batch)
    segments = (*decision.segments, *(cell.segment for cell in cells))
    return replace(decision, segments=segments, peaks=peaks), state


def _fit_stages(rewrite: Rewrite, acts: Activations, resolved: Plan, step: Step) -> tuple[Decision, Propagation]:
    """Fit each device of a pipeline, whose stages hold what as many micro-batches need as are under way there."""
    remat = resolved.remat
    assert remat is not None
    assert remat.limit is not None
    stages = _stages(acts, resolved)
    needs = _needs(rewrite, acts, resolved, step, stages)
    chosen = choose_by_stage(acts, step, stages, needs, remat)
    place = {node.name: i for i, node in enumerate(acts.forward)}
    segments = sorted((s for one in chosen for s in one.choice.segments), key=lambda s: place[s.nodes[0]])
    decision, state = rematerialize(acts, segments)
    done: dict[int, list[list[Node]]] = {}
    for nodes in _nodes(rewrite, decision.segments):
        done.setdefault(stages[nodes[0]], []).append(nodes)
    found = device_peaks(chosen, done)
    after = max(peak for _, peak in found.values())
    _require_room(after, remat.limit)
    peaks = Peaks(remat.limit, max(peak for peak, _ in found.values()), after, step.sizes.batch)
    return replace(decision, peaks=peaks), state


def _stages(acts: Activations, resolved: Plan) -> dict[Node, int]:
    """Return the stages that forward and backward will be divided into."""
    assert resolved.pipeline is not None
    state, forward, lists = acts.state, set(acts.forward), future_splits(acts.state)
    each = [node for node in state.order if not has(node.op, "constant") and differs_by_replica(state, node, lists)]
    found = forward_stages(resolved, state, [node for node in each if node in forward])
    rest = [node for node in each if node not in forward]
    backward_stages(rest, found, gradients_of(rest, acts.backward, found), resolved.pipeline.stages)
    return found


def _needs(
    rewrite: Rewrite, acts: Activations, resolved: Plan, step: Step, stages: Mapping[Node, int]
) -> list[StageNeeds]:
    """Return what each stage holds: its variables with what is kept for them, and the sums of their gradients."""
    pipeline, graph, variables = resolved.pipeline, rewrite.graph, rewrite.item.variables
    assert pipeline is not None
    owners, kept, everywhere = owners_of(resolved, acts.state, variables), [0] * pipeline.stages, 0
    for variable in variables.values():
        handle = graph.nodes.get(variable.handle)
        if handle is None:
            continue
        read = [
            stages[use.node] for value in _reads(owners.get(handle, handle)) for use in value.uses if use.node in stages
        ]
        if read:
            kept[min(read)] += variable.nbytes
        else:
            everywhere += variable.nbytes
    for value in _gradients(graph, resolved):
        kept[stages.get(value.node, 0)] += step.sizes.nbytes(acts.state.source(value))
    devices = pipeline.devices[: len(pipeline.devices) // resolved.replicas]
    schedule = "1f1b" if pipeline.schedule == "one_f_one_b" and not resolved.looped else "gpipe"
    return [
        StageNeeds(
            number,
            devices[number % len(devices)],
            ideal_in_flight(schedule, number, pipeline.stages, resolved.microbatches),
            nbytes + everywhere,
            is_last=number == pipeline.stages - 1,
        )
        for number, nbytes in enumerate(kept)
    ]


def _gradients(graph: Graph, resolved: Plan) -> list[Value]:
    """Return the gradients of variables, each once."""
    return list(dict.fromkeys(graph.value(edge.value) for edge in resolved.edges if edge.owner != STEP))


def _reads(handle: Node) -> list[Value]:
    return [value for use in handle_uses(handle) if has(use.node.op, "reads") for value in use.node.read_outputs]


def _nodes(rewrite: Rewrite, segments: Sequence[Segment]) -> list[list[Node]]:
    return [[rewrite.graph.nodes[name] for name in segment.nodes] for segment in segments]


def _require_room(peak: int, limit: int) -> None:
    """Check the peak with what could be computed again.

    Raises:
        PlanError: something could not wait for any gradient, so that it is kept, and there is no room for it.
    """
    if peak > limit:
        raise PlanError(
            f"remat.policy: with what can wait for a gradient computed again, a step takes {peak:,} B on a device, and "
            f"{limit:,} B are allowed",
            hint="allow more, or divide the batch by more micro-batches or replicas",
        )


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
        kept += sum(sizes.nbytes(state.source(value)) for value in _gradients(rewrite.graph, resolved))
    roots = (*rewrite.targets, *(value.node for value in outputs))
    return Step(tuple(dict.fromkeys(roots)), frozenset(outputs), sizes, kept, _together(plan, rewrite.task))


def _together(plan: Plan, task: int) -> int:
    """Return how many replicas the fullest device has: shared variables on CPUs bring all of them to the first."""
    devices = run_devices(plan, task)
    each = 1 if plan.pipeline is None else len(devices) // plan.replicas
    return max(Counter(devices[::each]).values())
