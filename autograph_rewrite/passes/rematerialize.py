"""Recompute activations in the backward pass instead of keeping them for it.

    before   x ─► [ a ─► b ─► c ] ─► d ...              a, b and c are kept until their gradients have been made
    after    x ─► [ a ─► b ─► c ] ─► d ...              x alone is kept
             x ─► [ a' ─► b' ─► c' ] ─► gradients       ^dd: not before the gradient that comes to c is there

It works on the backward pass that the graph already has. `resolve.remat` decides which activations are recomputed, in
which segments, and which gradients these wait for; this module inserts the copies. It runs before `resolve-plan`, when
every value has a placement and nothing is converted yet: copies are then ordinary nodes, which every replica and
micro-batch has.

A copy is the same op with the same operands on the same device. Copies that read no other copy wait for a gradient:
without that they would run at once, and save no memory. The control edges, and the attributes that name the
originals, also keep TensorFlow from merging copies with originals. (An IdentityN of operands and trigger does not:
TensorFlow 2.21 takes it apart, and merges.) Segments within a segment are copied again, from the copies that are kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autograph_rewrite.analysis.op_work import cost_of
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.recorded_shapes import record_shapes, static_shape
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import first_devices
from autograph_rewrite.resolve.edges import reshard_edges
from autograph_rewrite.resolve.remat.activations import (
    Activations,
    Decision,
    Left,
    Peaks,
    Segment,
    find_activations,
    first_of_each,
)
from autograph_rewrite.resolve.remat.budget import choose
from autograph_rewrite.resolve.remat.loops import LoopCell, cells_of
from autograph_rewrite.resolve.remat.policies import OFFLOAD_ATTR, parts_of, values_to_offload
from autograph_rewrite.resolve.remat.segments import nested_segments, segments_of, triggers_of
from autograph_rewrite.resolve.remat.stages import by_stage, choose_by_stage, device_peaks, needs_of, stages_of
from autograph_rewrite.resolve.remat.step_memory import StepMemory, StepRun, gradients_of_variables, variable_bytes
from autograph_rewrite.resolve.stages.assignment import COPIES, copied, forward_nodes, is_copy, trained_nodes
from autograph_rewrite.resolve.wire_types import sizes_of

STATED = ("names", "collection", "scopes", "marked")
"""Policies by which users name the nodes to recompute; the others choose nodes that save memory."""
ON_HOST = "nothing is offloaded: all devices are CPUs, whose memory is the host's"
SEVERAL = "nothing is offloaded: stages in several processes have several hosts"
MODEL_AXIS = "what its loop saves for the gradient is kept: cells are not computed again where a model axis cuts them"
NOTHING = "nothing is computed again: no gradient reads what this policy would compute again, or all of them at once"
FITS = "nothing is computed again: a step takes {peak:,} B on a device as it is, and {limit:,} B are allowed"
ASSUMED = "the graph does not say how large the batch is: for the budget it is taken to have {batch} examples in all"
FIRST = "no gradient comes before its own: all of it is read as soon as it has been made"


def recompute(rewrite: Rewrite, remat: Remat) -> tuple[Decision, Propagation]:
    """Edit the graph as `remat` says; return the decision and the new placements.

    Raises:
        PlanError: the plan names nodes that the graph lacks, nothing distinguishes the loss from its gradients, or no
            step fits the budget.
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
        if remat.policy != "marked":  # the program asks for `marked`, not the configuration
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
    """Recompute the activations that the policy chooses."""
    parts, inner = parts_of(acts, remat)
    if resolved.pipeline is not None:
        stages = stages_of(acts, resolved)
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
    """Recompute cells of loops."""
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
    """Move values to the host's memory, if devices have separate memory."""
    plan = rewrite.plan
    if all(is_host(device) for device in plan.devices) or plan.is_driven:
        reason = SEVERAL if plan.is_driven else ON_HOST
        return replace(decision, left=(*decision.left, Left("remat.offload", reason))), acts.state
    done, left, state = offload(acts, values_to_offload(acts, remat, decision.segments))
    return replace(decision, left=(*decision.left, *first_of_each(left)), offloaded=tuple(done)), state


def is_host(device: str) -> bool:
    """Return whether the memory of a device is the host's."""
    return parse(device).kind == "CPU"


# A budget.


def recompute_within(rewrite: Rewrite, acts: Activations, resolved: Plan, remat: Remat) -> tuple[Decision, Propagation]:
    """Recompute as little as makes a step fit in `remat.limit`.

    Raises:
        PlanError: no step fits, or a step does not fit because a segment has no gradient to wait for.
    """
    assert remat.limit is not None
    step = step_of(rewrite, acts.state, resolved)
    fit = _fit_stages if resolved.pipeline is not None else _fit_device
    decision, state, before, after = fit(rewrite, acts, resolved, step, remat)
    if after > remat.limit:  # a segment without a gradient to wait for is kept, and does not fit
        raise PlanError(
            f"remat.policy: with what can wait for a gradient computed again, a step takes {after:,} B on a device, "
            f"and {remat.limit:,} B are allowed",
            hint="allow more, or divide the batch by more micro-batches or replicas",
        )
    left = decision.left
    if not decision.segments and before <= remat.limit:
        left = (*left, Left("remat.policy", FITS.format(peak=before, limit=remat.limit)))
    if not (acts.state.semantics.extent.units or rewrite.request.batch):
        left = (*left, Left("remat.policy", ASSUMED.format(batch=step.sizes.batch)))
    return replace(decision, left=left, peaks=Peaks(remat.limit, before, after, step.sizes.batch)), state


def _fit_device(
    rewrite: Rewrite, acts: Activations, resolved: Plan, step: StepRun, remat: Remat
) -> tuple[Decision, Propagation, int, int]:
    """Fit a device that holds the whole model; also return its peaks before and after."""
    assert remat.limit is not None
    memory, cells = StepMemory(acts, step), list[LoopCell]()
    before = memory.peak(())
    try:
        choice = choose(acts, memory, remat.limit, remat.policy)
    except PlanError:  # nothing fits next to the values that loops save
        cells, _ = cells_of(acts, remat, [rewrite.graph.value(edge.value) for edge in resolved.edges])
        if not cells or rewrite.plan.model is not None:
            raise
        acts = recompute_in_loops(rewrite, acts, cells)
        memory = StepMemory(acts, step_of(rewrite, acts.state, resolved))
        choice = choose(acts, memory, remat.limit, remat.policy, before)
    decision, state = rematerialize(acts, choice.segments)
    after = memory.peak(_nodes(rewrite, decision.segments))
    segments = (*decision.segments, *(cell.segment for cell in cells))
    return replace(decision, segments=segments), state, before, after


def _fit_stages(
    rewrite: Rewrite, acts: Activations, resolved: Plan, step: StepRun, remat: Remat
) -> tuple[Decision, Propagation, int, int]:
    """Fit each device of a pipeline; its stages hold the activations of all micro-batches in flight there."""
    stages = stages_of(acts, resolved)
    chosen = choose_by_stage(acts, step, stages, needs_of(acts, rewrite.item.variables, resolved, step, stages), remat)
    place = {node.name: i for i, node in enumerate(acts.forward)}
    segments = sorted((s for one in chosen for s in one.choice.segments), key=lambda s: place[s.nodes[0]])
    decision, state = rematerialize(acts, segments)
    done: dict[int, list[list[Node]]] = {}
    for nodes in _nodes(rewrite, decision.segments):
        done.setdefault(stages[nodes[0]], []).append(nodes)
    found = device_peaks(chosen, done).values()
    return decision, state, max(before for before, _ in found), max(after for _, after in found)


def _nodes(rewrite: Rewrite, segments: Sequence[Segment]) -> list[list[Node]]:
    return [[rewrite.graph.nodes[name] for name in segment.nodes] for segment in segments]


def step_of(rewrite: Rewrite, state: Propagation, resolved: Plan) -> StepRun:
    """Return what a device runs in one step, to estimate its memory."""
    plan, outputs = rewrite.plan, rewrite.outputs
    sizes = sizes_of(rewrite.job, state, rewrite.request.batch)
    kept = variable_bytes(plan, rewrite.item.variables)
    if plan.microbatches > 1:  # each gradient also has a sum over micro-batches
        kept += sum(sizes.nbytes(state.source(value)) for value in gradients_of_variables(rewrite.graph, resolved))
    roots = (*rewrite.targets, *(value.node for value in outputs))
    # replicas on the fullest device: with shared variables on CPUs, all replicas are on the first
    together = max(Counter(first_devices(plan, rewrite.task)).values())
    return StepRun(tuple(dict.fromkeys(roots)), frozenset(outputs), sizes, kept, together)


# Copies.


def rematerialize(acts: Activations, segments: Sequence[Segment]) -> tuple[Decision, Propagation]:
    """Copy segments in the graph; return the decision and the new placements.

    Args:
        segments: to recompute, in forward order.
    """
    graph = acts.state.graph
    done: list[Segment] = []
    left: list[Left] = []
    numbers = itertools.count(len(segments))
    for number in reversed(range(len(segments))):
        segment = segments[number]
        copies = copy_segment(acts, segment, graph.nodes, number)
        if copies is None:
            left.append(Left(segment.nodes[0], FIRST))
        elif segment.inside:
            done.append(_copy_again(acts, segment, copies, numbers))
        else:
            done.append(segment)
    return Decision(tuple(reversed(done)), tuple(reversed(left))), revise(acts.state)


def copy_segment(acts: Activations, segment: Segment, nodes: Mapping[str, Node], number: int) -> dict[str, Node] | None:
    """Copy a segment for its gradients; return the copies, or None if there is no gradient that they can wait for.

    Args:
        nodes: by name, the originals or copies of them.
        number: of the segment, in the names of its copies.
    """
    inside = [nodes[name] for name in segment.nodes]
    readers = [list(acts.readers(node)) for node in inside]
    triggers = triggers_of(acts, inside, {use.node for uses in readers for use in uses})
    if not triggers:
        return None
    copies = copy_nodes(acts.state.graph, inside, f"{COPIES}/{number}", triggers)
    for uses in readers:
        read_copies(uses, copies)
    return {name: copies[nodes[name]] for name in segment.nodes}


def _copy_again(acts: Activations, segment: Segment, copies: dict[str, Node], numbers: Iterator[int]) -> Segment:
    """Copy the copies in segments within a segment, the last first; drop those that are no longer read."""
    graph = acts.state.graph
    inside = [one for one in reversed(segment.inside) if copy_segment(acts, one, copies, next(numbers)) is not None]
    flops = 0.0
    for name in reversed(segment.nodes):
        if any(value.uses for value in copies[name].read_outputs):
            flops += cost_of(acts.state, graph.nodes[name])
        else:
            graph.erase(copies[name])
    return replace(segment, added_flops=flops, inside=tuple(reversed(inside)))


def copy_nodes(
    graph: Graph,
    nodes: Sequence[Node],
    scope: str,
    triggers: Sequence[Node],
    known: Mapping[Value, Value] = MappingProxyType({}),
) -> dict[Node, Node]:
    """Add a copy of each node; copies that read no copies but constants wait for the triggers.

    Args:
        nodes: in topological order.
        scope: prefix of the copies' names.
        triggers: gradients after which copies may run.
        known: values that copies read instead of others.
    """
    copies: dict[Node, Node] = {}
    for node in nodes:
        made = {value: copies[value.node] for value in node.inputs if value.node in copies and value not in known}
        inputs = [made[v].output(v.index) if v in made else known.get(v, v) for v in node.inputs]
        waits = () if any(not has(one.op, "constant") for one in made.values()) else triggers
        copies[node] = copy_node(graph, node, inputs, name=f"{scope}/{copied(node.name)}", controls=waits)
    return copies


def read_copies(uses: Sequence[Use], copies: dict[Node, Node]) -> None:
    """Let readers read the copies instead of the originals."""
    for use in uses:
        value = use.node.inputs[use.index]
        use.node.set_input(use.index, copies[value.node].output(value.index), use.node.selects.get(use.index))


# Loops.


def recompute_in_loops(rewrite: Rewrite, acts: Activations, cells: Sequence[LoopCell]) -> Activations:
    """Recompute cells in the loops of their gradients, instead of saving their values in every iteration.

        before   Pop(a) ─► da            Pop(b) ─► db              three lists: h, a, b
        after    Pop(h) ─► a' ─► b'      a' ─► da;  b' ─► db       one list; ^dh': not before the gradient of the state

    Without the control edge the executor would run ahead, up to ten iterations at a time.
    """
    graph = acts.state.graph
    for number, cell in enumerate(cells, start=len(graph)):  # the names of segments outside of loops count from 0
        readers = [(one.value, use) for one in cell.dropped for use in one.taken.uses]
        known = {value: one.taken for value, one in cell.kept.items()}
        for value in [one for one in cell.kept if one in cell.moved]:
            _put_instead(cell, value)
        known |= {value: _enter(graph, node, cell, number) for value, node in cell.fixed.items()}
        copies = copy_nodes(graph, cell.nodes, f"{COPIES}/{number}", cell.triggers, known)
        for value, use in readers:
            use.node.set_input(use.index, copies[value.node].output(value.index), use.node.selects.get(use.index))
    eliminate_dead_code(graph, rewrite.roots)
    alive = set(graph)
    return Activations(
        revise(acts.state),
        tuple(node for node in acts.forward if node in alive),
        acts.backward & alive,
        acts.repeatable & alive,
        acts.unconditional & alive,
    )


def _put_instead(cell: LoopCell, value: Value) -> None:
    """Let the list of a kept value hold another value."""
    one = cell.kept[value]
    one.maker.set_input(0, Builder.at(one.maker, device=one.maker.device).const(-1, dtypes.INT32, "any_shape"))
    one.push.set_input(1, value)
    record_shapes(one.pop, [(), static_shape(value)])


def _enter(graph: Graph, node: Node, cell: LoopCell, number: int) -> Value:
    """Let a value that enters the forward loop enter the loop of the gradient."""
    name = f"{COPIES}/{number}/{copied(node.name)}"
    enter = copy_node(graph, node, node.inputs, name=name)
    enter.set_attr("frame_name", cell.frame[0].encode())
    return enter.output()


# The host's memory.


def offload(acts: Activations, nodes: Sequence[Node]) -> tuple[list[str], list[Left], Propagation]:
    """Move values to the host's memory as soon as they are computed, and back before gradients read them.

        before   h @gpu ─► forward                                        h @gpu ─► gradients
        after    h @gpu ─► forward;  h ─► Snapshot @cpu ─► Snapshot @gpu ^upstream ─► gradients

    A value returns when the gradients are there that the next later value needs to wait for, so that its transfer
    overlaps with later gradients. An Identity does not work: TensorFlow 2.21 removes both to save transfers.

    Args:
        acts: activations of the graph, after rematerialisation.
        nodes: to offload, in forward order.
    """
    graph = acts.state.graph
    segments = _waits_of_copies(graph)
    done: list[str] = []
    left: list[Left] = []
    later: Collection[Node] = ()  # the nodes that the next later value waits for
    for node in reversed(nodes):
        readers = [use for value in node.read_outputs for use in value.uses if _is_later(acts, use.node)]
        if not readers:
            continue
        waits = dict.fromkeys(triggers_of(acts, [node], {use.node for use in readers if use.node in acts.backward}))
        for use in readers:
            waits |= dict.fromkeys(segments.get(_segment(use.node), ()))
        behind = descendants(use.node for use in readers)
        waits = {one: None for one in waits if one not in behind}
        if not waits:
            left.append(Left(node.name, FIRST))
            continue
        early = later if later and behind.isdisjoint(later) else tuple(waits)
        _move(graph, node, readers, early)
        later = tuple(waits)
        done.append(node.name)
    return done[::-1], left[::-1], revise(acts.state)


def _move(graph: Graph, node: Node, readers: Sequence[Use], waits: Collection[Node]) -> None:
    """Let the readers of a node read the value that returns from the host."""
    for value in node.read_outputs:
        uses = [use for use in readers if use.node.inputs[use.index] is value]
        if not uses:
            continue
        away = Builder(graph, f"offload/{node.name}", node, device=node.device).node("Snapshot", value)
        away.set_raw_attr(OFFLOAD_ATTR, encode("string", "host"))
        name = f"{COPIES}/{len(graph)}/{node.name}"
        back = Builder(graph, name, node, device=node.device).node("Snapshot", away.output(), controls=waits)
        away.span = back.span = node.span
        for use in uses:
            use.node.set_input(use.index, back.output(), use.node.selects.get(use.index))


def _is_later(acts: Activations, node: Node) -> bool:
    return (node in acts.backward and not has(node.op, "sizes")) or is_copy(node.name)


def _segment(node: Node) -> str:
    return node.name.removesuffix(copied(node.name))


def _waits_of_copies(graph: Graph) -> dict[str, dict[Node, None]]:
    """Return the nodes that the copies of each segment wait for, by the scope of their names."""
    found: dict[str, dict[Node, None]] = {}
    for node in graph:
        if is_copy(node.name):
            found.setdefault(_segment(node), {}).update(dict.fromkeys(node.controls))
    return found


def _run(rewrite: Rewrite) -> None:
    """Recompute activations for the gradients that need them, instead of keeping them (`remat`)."""
    assert rewrite.plan.remat is not None
    decision, state = recompute(rewrite, rewrite.plan.remat)
    rewrite.put(decision)
    rewrite.put(state)


REMATERIALIZE = Pass(
    "rematerialize", _run, lambda rewrite: rewrite.plan.remat is not None, (Propagation,), (Propagation, Decision)
)
