"""Run the passes in their order: all of them to a distributed graph, or the first ones to a plan.

    eliminate-dead-code ► shard-variables ► propagate ► decompose ► place-reductions ► rematerialize ► resolve-plan
      ► insert-reshards ► lower-reshards ► pad-empty-blocks ► merge-instances ► order-accesses ► assign-devices
      ► update-rows ► expand

All passes before `expand` work on the folded graph, whose size does not depend on the number of replicas.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PassError, PlanError, RewriteError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MODEL, ONCE, REPLICA
from autograph_rewrite.ir.run_writes import RunWrites, compared, original_name
from autograph_rewrite.ir.verify.dead_values import check_arrivals, on_other_replicas
from autograph_rewrite.ir.verify.whole_runs import check_runs
from autograph_rewrite.passes.base.anchors import digest_names
from autograph_rewrite.passes.base.order_accesses import DRAW_BEFORE_WRITES, ORDER_ACCESSES
from autograph_rewrite.passes.base.pass_manager import Observer, Pass, run_passes
from autograph_rewrite.passes.base.report import Report, Resolved
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.batch.localize_shapes import LOCALIZE_SHAPES
from autograph_rewrite.passes.batch.pad_empty_blocks import PAD_EMPTY_BLOCKS
from autograph_rewrite.passes.batch.random_numbers import DECORRELATE_RANDOMNESS, SPLIT_DRAWS
from autograph_rewrite.passes.batch.slice_batch_inputs import SLICE_BATCH_INPUTS
from autograph_rewrite.passes.canonicalize.decompose import DECOMPOSE
from autograph_rewrite.passes.canonicalize.local_batch_norm import LOCAL_BATCH_NORM
from autograph_rewrite.passes.canonicalize.variable_policies import VARIABLE_POLICIES
from autograph_rewrite.passes.canonicalize.varying_values import MARK_REPLICAS, MERGE_VARYING, NUMBER_REPLICAS
from autograph_rewrite.passes.compression.compressor_state import DECLARE_STATE, KEEP_COMPONENTS
from autograph_rewrite.passes.emit.exchange_digests import EXCHANGE_DIGESTS
from autograph_rewrite.passes.emit.expand import EXPAND, Expanded
from autograph_rewrite.passes.emit.instances import ASSIGN_DEVICES
from autograph_rewrite.passes.emit.merge_instances import MERGE_INSTANCES, Merged
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout, instance_name
from autograph_rewrite.passes.emit.tensor_map import Layout
from autograph_rewrite.passes.emit.update_rows import UPDATE_ROWS
from autograph_rewrite.passes.local_sgd.train_alone import COUNT_STEPS, TRAIN_ALONE, Alone
from autograph_rewrite.passes.localize.localize_indices import LOCALIZE_INDICES, LOCALIZE_KEPT_ROWS
from autograph_rewrite.passes.localize.rows_of_shards import ROWS_OF_SHARDS
from autograph_rewrite.passes.localize.sizes_of_inputs import GATHER_FOR_OUTPUTS, SIZES_OF_INPUTS
from autograph_rewrite.passes.micro_batches.sequential_averages import FIND_AVERAGES, SEQUENTIAL_AVERAGES
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL
from autograph_rewrite.passes.parameter_server.delegate_to_chief import DELEGATE_TO_CHIEF, PARAMETER_SERVERS
from autograph_rewrite.passes.pipeline_parallel.loop import ROLL_LOOP
from autograph_rewrite.passes.place_reductions import PLACE_REDUCTIONS
from autograph_rewrite.passes.preconditions import CHECK_TRAINING, require_no_servers
from autograph_rewrite.passes.propagate import PROPAGATE
from autograph_rewrite.passes.prune import BIND_CAPTURES, ELIMINATE_DEAD_CODE, Recorded
from autograph_rewrite.passes.rematerialize import REMATERIALIZE
from autograph_rewrite.passes.reshard.insert_reshards import (
    ASSIGN_SPANS,
    ASSIGN_STAGES,
    INSERT_RESHARDS,
    MEASURE_BLOCKS,
    Reshards,
)
from autograph_rewrite.passes.reshard.lower_reshards import LOWER_RESHARDS
from autograph_rewrite.passes.resolve_plan import RESOLVE_PLAN
from autograph_rewrite.passes.sharding.local_program import blocks_of
from autograph_rewrite.passes.sharding.partition_model import PARTITION_MODEL
from autograph_rewrite.passes.sharding.residence import PLACE_VARIABLES, split_over_replicas
from autograph_rewrite.passes.sharding.shard_variables import SHARD_VARIABLES, WholeVariables
from autograph_rewrite.passes.user_passes import with_user_passes
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.parts.residence import Sharded, shard_name
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.plan.variable_policies import described
from autograph_rewrite.resolve.batch import named_groups, own_inputs
from autograph_rewrite.resolve.remat.activations import Decision
from autograph_rewrite.training_graph import EncodedGraph, Shards, TrainingGraph, Variable

ANALYSIS: tuple[Pass, ...] = (
    PROPAGATE,
    TRAIN_ALONE,
    VARIABLE_POLICIES,
    MERGE_VARYING,
    SIZES_OF_INPUTS,
    SPLIT_DRAWS,
    LOCAL_BATCH_NORM,
    LOCALIZE_INDICES,
    LOCALIZE_KEPT_ROWS,
    DECOMPOSE,
    PLACE_REDUCTIONS,
    GATHER_FOR_OUTPUTS,
    REMATERIALIZE,
)
"""The passes that find the placements of a graph."""

PLANNING: tuple[Pass, ...] = (
    SLICE_BATCH_INPUTS,
    ELIMINATE_DEAD_CODE,
    BIND_CAPTURES,
    PARTITION_MODEL,
    SHARD_VARIABLES,
    PLACE_VARIABLES,
    MARK_REPLICAS,
    *ANALYSIS,
    CHECK_TRAINING,
    RESOLVE_PLAN,
)
"""The passes that complete the plan. Every value has a placement after `propagate`; these passes convert no value."""

CONVERSION: tuple[Pass, ...] = (
    ASSIGN_SPANS,
    ASSIGN_STAGES,
    MEASURE_BLOCKS,
    INSERT_RESHARDS,
    LOWER_RESHARDS,
    FIND_AVERAGES,
    NUMBER_REPLICAS,
    EXCHANGE_DIGESTS,
    DECORRELATE_RANDOMNESS,
    LOCALIZE_SHAPES,
    KEEP_COMPONENTS,
    COUNT_STEPS,
    DECLARE_STATE,
    PAD_EMPTY_BLOCKS,
    SEQUENTIAL_AVERAGES,
    MERGE_INSTANCES,
    PARAMETER_SERVERS,
    ORDER_ACCESSES,
    DELEGATE_TO_CHIEF,
    DRAW_BEFORE_WRITES,
    ROLL_LOOP,
)
"""The passes that convert values as the plan says, and complete the folded graph."""

PIPELINE: tuple[Pass, ...] = (*PLANNING, *CONVERSION, ASSIGN_DEVICES, ROWS_OF_SHARDS, UPDATE_ROWS, EXPAND)


RESOLVING = tuple(one for one in PLANNING if one not in (BIND_CAPTURES, CHECK_TRAINING))
"""The passes that only complete a plan. Captured variables keep their devices; `CHECK_TRAINING` refuses no graph."""


def rewrite(
    request: Request, *, verify: bool = False, observers: Sequence[Observer] = (), in_place: bool = False
) -> TrainingGraph:
    """Distribute a normalised item over the replicas of a plan.

    Args:
        request: the item and the plan; edges of the plan, if any, must be those of this graph.
        verify: check the folded graph after each pass that has edited it.
        in_place: edit the item's graph instead of a copy.

    Raises:
        GraphError: no batch input, or nothing to distribute.
        PlanError: the plan was resolved on another graph.
        PassError: an edge cannot be lowered; with `strict`, an op without a rule.
    """
    with no_garbage_collection():
        item, original = request.item, request.item.graph
        # Alternatives exist for micro-batches only, and are tried on the unedited graph.
        kept = original.clone() if in_place and request.plan.microbatches > 1 else original
        graph = original if in_place else original.clone()
        if request.certificate is not None:
            request.certificate.begin(graph, item.targets)
        try:
            return _rewrite(request, graph, verify=verify, observers=observers)
        except (PassError, PlanError) as error:

            def attempt(other: Plan) -> None:
                graph = kept.clone()
                _rewrite(Request(replace(item, source=graph), other, request.task, request.training), graph)

            add_alternatives(error, request.plan, attempt)
            raise


def try_out(request: Request) -> None:
    """Run all passes but `expand`, which refuses nothing, on a copy of the graph.

    Raises:
        RewriteError: as `rewrite` does, without alternatives in its hint.
    """
    with no_garbage_collection():
        _folded(request, request.item.graph.clone(), verify=True)


def _rewrite(
    request: Request, graph: Graph, *, verify: bool = False, observers: Sequence[Observer] = ()
) -> TrainingGraph:
    state = _folded(request, graph, verify=verify, observers=observers)
    run_passes(state, PIPELINE[-1:])
    return finished(state)


def _folded(request: Request, graph: Graph, *, verify: bool = False, observers: Sequence[Observer] = ()) -> Rewrite:
    """Return the rewrite after all passes but `expand`."""
    state = Rewrite.of(request, graph)
    require_no_servers(state.job)
    run_passes(state, with_user_passes(PIPELINE[:-1], state.plan), verify=verify, observers=observers)
    if verify and len(set(run_devices(state.plan))) > 1:
        check_arrivals(state.graph, {node.name for node in state.get(Propagation).order}, on_other_replicas)
        check_runs(state.graph, state.mesh, state.roots)
    return state


def resolve(item: TrainingGraph, plan: Plan, batch: int | None = None) -> Plan:
    """Return the plan with its edges on this graph, and its coverage; the item is not edited.

    Args:
        item: must have a flat graph.
        plan: its edges, if any, are ignored.
        batch: as in `Request`.

    Raises:
        GraphError: the graph has no batch input.
    """
    with no_garbage_collection():
        state = Rewrite.of(Request(item, replace(plan, edges=()), batch=batch), item.graph.clone())
        run_passes(state, with_user_passes(RESOLVING, state.plan))
        return replace(state.plan, devices=plan.devices, mode=plan.mode, mesh=plan.mesh, variables=plan.variables)


def analyse(graph: Graph, item: TrainingGraph, plan: Plan, batch: int | None = None) -> tuple[Propagation, list[Value]]:
    """Run the passes of `ANALYSIS` on `graph`; return its placements and the values of the item's outputs.

    Args:
        graph: is edited; its anchors are the item's outputs.
        batch: as in `Request`.
    """
    state = Rewrite(Request(item, plan, batch=batch), graph, plan, item, plan)
    run_passes(state, with_user_passes(ANALYSIS, plan))
    return state.get(Propagation), state.outputs


# The distributed item of a rewrite that has run every pass: its graph, its layout and its report.


MEETING = "all micro-batches meet before it, and what each has made so far is kept until then"
OTHER_SIZE = "its static size is not that of the batch, so every replica has all of it"


def finished(rewrite: Rewrite) -> TrainingGraph:
    """Return the distributed item of a rewrite that has run every pass."""
    item, task, state = rewrite.item, rewrite.task, rewrite.get(Propagation)
    variables = rewrite.get(WholeVariables).variables if rewrite.has(WholeVariables) else item.variables
    return replace(
        item,
        source=EncodedGraph(rewrite.get(Expanded).data),
        stated_placements=None,
        report=_report(rewrite),
        layout=_layout(rewrite),
        inputs=own_inputs(item, rewrite.plan, state, task),
        variables=in_pieces(rewrite, variables),
    )


def in_pieces(rewrite: Rewrite, variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables; those in shards on replicas, or in blocks on a model axis, with the handles of the pieces.

    A variable with both is cut into blocks, and each block into shards.
    """
    found = dict(variables)
    shards = split_over_replicas(rewrite)
    blocks = blocks_of(rewrite).of
    replicas = range(rewrite.plan.replicas)
    mine = rewrite.of_own_replicas(replicas)
    for name in [name for name in variables if name in shards or name in blocks]:
        if (node := rewrite.graph.nodes.get(found[name].handle)) is None:
            continue
        pieces = _handles(rewrite, node)
        cut, levels = shards.get(name), blocks.get(name, ())
        alike = rewrite.mesh.lines([axis for axis, _ in levels])  # the devices of each copy
        if cut is None:
            copies = [[(replica, at) for at in devices] for replica in mine for devices in alike]
        else:
            copies = [[(replica, at) for at in devices for replica in replicas] for devices in alike]
        handles = [tuple(pieces[one][0] for one in copy) for copy in copies]
        found[name] = replace(
            found[name],
            handle=pieces[mine[0], 0][0],
            shards=replace(
                _nested([*(block for _, block in levels), *([cut] if cut is not None else [])]),
                handles=handles[0],
                devices=tuple(pieces[one][1] for copy in copies for one in copy),
                elsewhere=tuple(k for k, (replica, _) in enumerate(copies[0]) if replica not in mine),
                copies=tuple(handles) if rewrite.along > 1 else (),
            ),
        )
    return found


def _nested(cuts: Sequence[Sharded]) -> Shards:
    """Return the shards of a variable that is cut several times, the outermost cut first."""
    first, *rest = cuts
    within = (_nested(rest),) * len(first.sizes) if rest else ()
    return Shards(first.axis, first.sizes, (), within=within)


def _handles(rewrite: Rewrite, node: Node) -> dict[tuple[int, int], tuple[str, str]]:
    """Return the name and device of each handle of a variable, by replica and number of the device in the replica."""
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for number, device in enumerate(rewrite.devices_along):  # handles of other processes keep these names
        found[divmod(number, rewrite.along)] = shard_name(node.name, number), device
    layout, common = rewrite.get(ReplicaLayout), rewrite.get(Merged).common
    for i in range(layout.mesh.count(node.span)):
        at = layout.mesh.coordinates(node.span, i)
        found[rewrite.replica_at(at), at.get(MODEL, 0)] = instance_name(node, i, common), layout.device(node, i)
    return found


def _report(rewrite: Rewrite) -> Report:
    graph, item, plan, job = rewrite.graph, rewrite.item, rewrite.plan, rewrite.job
    resolved, instances = rewrite.get(Resolved), rewrite.get(ReplicaLayout)
    recomputed = rewrite.get(Decision) if rewrite.has(Decision) else Decision()
    copies = sum(instances.mesh.count(span) * nodes for span, nodes in Counter(node.span for node in graph).items())
    notes = [*resolved.notes, *(Note(*one) for one in (*item.notes, *recomputed.notes))]
    notes += [Note(info.name, "input", OTHER_SIZE) for info in resolved.shared]
    notes += [Note(node.name, node.op, MEETING) for node in instances.order.meetings]
    return Report(
        replace(plan, devices=job.devices, mode=job.mode, mesh=job.mesh, variables=rewrite.asked),
        tuple(rewrite.records),
        tuple(notes),
        rewrite.nodes_before,
        len(graph),
        copies,
        time.perf_counter() - rewrite.began,
        tuple(one.named() for one in rewrite.compressed),
        task=rewrite.request.task,
        digests=digest_names(graph),
        homes=rewrite.homes.of,
        held=held_bytes(rewrite),
        batches=named_groups(rewrite.get(Reshards).groups, item, rewrite.get(Propagation), resolved.shared),
        inexact=resolved.inexact,
        alone=rewrite.get(Alone).own.variables if rewrite.has(Alone) else (),
        averaged=tuple(rewrite.get(Alone).averages.averaged) if rewrite.has(Alone) else (),
        policies=described(plan, item.variables),
        covered=resolved.covered,
        recomputed=recomputed,
    )


def _run_writes(rewrite: Rewrite) -> RunWrites:
    """Return what runs write: nothing with user passes, which may change it on purpose."""
    if rewrite.plan.passes:
        return RunWrites()
    original, homes = rewrite.get(Recorded), rewrite.homes.of
    on_chief = [rewrite.item.variables[name].handle for name in homes if rewrite.request.task]
    elsewhere = {original_name(handle, original.nodes) for handle in on_chief}
    return compared(original.writes, original.nodes, rewrite.graph, elsewhere)


def _layout(rewrite: Rewrite) -> Layout:
    plan, state = rewrite.plan, rewrite.get(Propagation)
    instances, merged = rewrite.get(ReplicaLayout), rewrite.get(Merged)
    return Layout(
        rewrite.graph,
        set(merged.common & set(rewrite.graph)),
        merged.spread,
        rewrite.aliases,
        instances.mesh,
        rewrite.feeds,
        moved=merged.moved,
        partial=rewrite.processes > 1,
        hidden=plan.looped,
        interleaved=plan.interleaved,
        state=(state.facts, state.raw),
        converted=rewrite.converted,
        writes=_run_writes(rewrite),
        blocked=blocks_of(rewrite).values,
    )


# How many bytes of variables each device holds.


def held_bytes(rewrite: Rewrite) -> dict[str, int]:
    """Return the bytes of all copies and shards of variables on each device of this process.

    Unknown dimensions count as 1.
    """
    layout, split = rewrite.get(ReplicaLayout), split_over_replicas(rewrite)
    found = dict.fromkeys(run_devices(rewrite.plan, rewrite.task), 0)
    for name, variable in rewrite.item.variables.items():
        node = rewrite.graph.nodes.get(variable.handle)
        if node is None:
            continue
        cut, mesh = split.get(name), layout.mesh
        sizes = rewrite.of_own_replicas(cut.sizes) if cut is not None else ()
        for i in range(mesh.count(node.span)):
            device = node.device if node.span == ONCE else layout.device(node, i)
            replica = mesh.coordinates(node.span, i).get(REPLICA, 0)
            part = variable.nbytes // cut.extent * sizes[replica] if cut is not None else variable.nbytes
            found[device] = found.get(device, 0) + part
    return found


# Suggest alternatives to a refused configuration of micro-batches or stages; each is tried on the graph first.
#
#     'conv/bn/Sub' needs 'conv/bn/mean' of the whole batch, for which no stage of a pipeline can wait
#       hint set semantics.batch_norm to local (...); or leave pipeline out: microbatches without stages can meet
#
# A refused graph does not run, so there is time to try them.


LOCAL = "set semantics.batch_norm to local (each micro-batch is then normalised by its own statistics)"


def add_alternatives(error: RewriteError, plan: Plan, attempt: Callable[[Plan], object]) -> None:
    """Add the alternatives that are accepted to the hint of a refusal.

    Args:
        plan: the refused plan.
        attempt: repeats the rewrite with another plan, and raises if that is refused, too.
    """
    if plan.microbatches == 1 or (isinstance(error, PlanError) and not plan.looped and error.hint):
        return  # the hint already says how to correct the plan
    lifting = [text for text, other in _alternatives(plan) if _is_accepted(attempt, other)]
    # `_alternatives` tries the unrolled form itself.
    own = [error.hint] if error.hint and error.hint != UNROLL else []
    error.change_hint("; or ".join([*own, *lifting]) or None)


def _alternatives(plan: Plan) -> Iterator[tuple[str, Plan]]:
    request = replace(plan, edges=())
    micro = plan.micro
    if plan.semantics.batch_norm == "sync":
        yield LOCAL, replace(request, semantics=replace(plan.semantics, batch_norm="local"))
    if micro is not None and plan.looped:
        section = "accumulation" if plan.pipeline is None else "pipeline"
        yield f"set {section}.form to unrolled", replace(request, micro=replace(micro, loop=False))
    if plan.pipeline is not None and plan.mode == "mirrored":
        yield "set strategy.variables to shared", replace(request, mode="shared")
    if micro is not None and plan.pipeline is not None and not plan.is_driven:
        text = "leave pipeline out: microbatches without stages can meet"
        yield text, replace(request, pipeline=None, micro=replace(micro, loop=False))


def _is_accepted(attempt: Callable[[Plan], object], plan: Plan) -> bool:
    try:
        attempt(plan)
    except RewriteError:
        return False
    return True
