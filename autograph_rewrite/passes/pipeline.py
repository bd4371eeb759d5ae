"""The passes, in order, on a copy of the graph; verified after each one.

    prune ► partition ► propagate ► cut draws ⇄ decompose ► cut ► rematerialize ► resolve the plan ► reshard ► guard
      ► merge ► place ► expand

Everything up to `expand` works on the folded graph, whose size does not depend on the number of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autograph_rewrite.analysis import cut
from autograph_rewrite.analysis.fact import LOCAL, Fact
from autograph_rewrite.analysis.once import mark_whole
from autograph_rewrite.analysis.own import block_statistics, mark_statistics
from autograph_rewrite.analysis.propagate import Propagation, notes, revise
from autograph_rewrite.analysis.rows import choose_gathers
from autograph_rewrite.analysis.rules.base import OWN_VALUE
from autograph_rewrite.errors import PassError, PlanError
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.frames import frames_of
from autograph_rewrite.ir.graph import Graph, Node, Span, Value
from autograph_rewrite.ir.quiet import no_garbage_collection
from autograph_rewrite.ir.verify import check_folded
from autograph_rewrite.ir.verify_dead import check_arrivals, on_other_replicas
from autograph_rewrite.item import GraphItem
from autograph_rewrite.passes import compress_choice
from autograph_rewrite.passes import edges as edge_list
from autograph_rewrite.passes.added import attach
from autograph_rewrite.passes.agreed import agreed
from autograph_rewrite.passes.alternatives import add_alternatives
from autograph_rewrite.passes.batch import batch_values, measured_input, named_groups, own_inputs, shared_by_size
from autograph_rewrite.passes.before_branches import copy_before_branches
from autograph_rewrite.passes.block_shapes import state_block_shapes
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.claims import claims_of
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.coverage import Coverage, with_coverage
from autograph_rewrite.passes.cut_draws import cut_draws
from autograph_rewrite.passes.decompose import decompose
from autograph_rewrite.passes.decorrelate import decorrelate
from autograph_rewrite.passes.digests import add_digests, digest_names, digest_nodes
from autograph_rewrite.passes.divided import coverage_of
from autograph_rewrite.passes.expand import expand
from autograph_rewrite.passes.guard import guard_empty_blocks
from autograph_rewrite.passes.hand_over import hand_over, lock_updates, name_served_roots
from autograph_rewrite.passes.held import held_bytes
from autograph_rewrite.passes.in_turn import averages_of, update_in_turn
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.layout import Layout
from autograph_rewrite.passes.localize_indices import localize_indices
from autograph_rewrite.passes.loop_micro import loop_micro
from autograph_rewrite.passes.loop_stages import loop_stages
from autograph_rewrite.passes.may_segment import propagate_parts
from autograph_rewrite.passes.merge import merge_kept, merge_outputs, merge_targets
from autograph_rewrite.passes.mirror import name_resources
from autograph_rewrite.passes.order_accesses import access_order, order_accesses
from autograph_rewrite.passes.order_reads import order_reads
from autograph_rewrite.passes.own_parts import take_own_parts
from autograph_rewrite.passes.partition import by_shards, partition, shard_variables
from autograph_rewrite.passes.place import run_devices, within_reach
from autograph_rewrite.passes.place_instances import place_instances
from autograph_rewrite.passes.proxies import add_proxies
from autograph_rewrite.passes.prune import prune
from autograph_rewrite.passes.rematerialize.step import recompute
from autograph_rewrite.passes.report import Note, PassRecord, Report
from autograph_rewrite.passes.required import require_no_servers, require_training
from autograph_rewrite.passes.reshard import Reshard, assign_spans
from autograph_rewrite.passes.rows_apart import mark_rows_apart
from autograph_rewrite.passes.run import Observer, Run
from autograph_rewrite.passes.served import served_by
from autograph_rewrite.passes.stages import assign_stages
from autograph_rewrite.plan.plan import Plan

MAX_DECOMPOSITIONS = 8
MEETING = "all micro-batches meet before it, and what each has made so far is kept until then"
OF_PARTS = "statistics of each part of the batch, not of the whole (semantics.batch_norm: local)"
IDLE = "semantics.batch_norm is local, and nothing in this graph is a batch normalisation to which that applies"
OTHER_SIZE = "its static size is not that of the batch, so every replica has all of it"


def rewrite(
    item: GraphItem,
    plan: Plan,
    *,
    verify: Callable[[Graph], None] | None = None,
    observers: Sequence[Observer] = (),
    training: bool = True,
    in_place: bool = False,
    task: int = 0,
    certificate: Certifier | None = None,
    batch: int | None = None,
) -> GraphItem:
    """Distribute a normalised item over the replicas of a plan.

    Args:
        item: flat graph; it is not changed.
        plan: the request; its edges, if it has any, must be those of this graph.
        verify: checks the folded graph after each pass.
        observers: called after each pass.
        training: refuse a graph that updates nothing, or whose updates do not depend on the batch.
        in_place: the caller owns the item's graph and has no more use for it.
        task: which of the plan's processes the graph is for.
        certificate: sees the rewrite, and refuses it where it does something else than the original.
        batch: examples of all replicas together, of which the coverage is told, where the graph leaves it open.

    Raises:
        GraphError: no batch input, or nothing to distribute.
        PlanError: the plan was resolved on another graph.
        PassError: an edge cannot be lowered; with `strict`, an op without a rule.
    """
    with no_garbage_collection():
        original = item.graph
        kept = original.clone() if in_place and plan.microbatches > 1 else original
        graph = original if in_place else original.clone()
        if certificate is not None:
            certificate.begin(graph, item.targets)
        try:
            return _rewrite(item, plan, Run(graph, verify, observers, certificate), training, task, batch)
        except (PassError, PlanError) as error:

            def attempt(other: Plan) -> None:
                graph = kept.clone()
                _rewrite(item.with_(graph=graph), other, Run(graph), training, task)

            add_alternatives(error, plan, attempt)
            raise


def analyse(graph: Graph, item: GraphItem, plan: Plan, run: Run | None = None) -> tuple[Propagation, list[Value]]:
    """Propagate placements through `graph`, decomposing what mixes examples; return them with the declared outputs."""
    run = run or Run(graph)
    mark_rows_apart(graph)
    batch, static = batch_values(graph, item, plan)
    with run.step("propagate"):
        state = propagate_parts(graph, batch, static, plan)
    with run.step("cut draws"):
        state = cut_draws(state)
    if plan.semantics.batch_norm == "local" and plan.microbatches > 1:  # replicas alone divide fused ones only
        state = mark_statistics(state, plan.instances)
    if plan.microbatches > 1 and localize_indices(graph, state):
        state = revise(state)
    for attempt in range(MAX_DECOMPOSITIONS + 1):
        marked = [node for node, answer in state.answers.items() if answer.decompose]
        if not marked:
            break
        if attempt == MAX_DECOMPOSITIONS:
            raise PassError(f"op {marked[0].op} still mixes examples after it was decomposed", node=marked[0])
        with run.step("decompose"):
            decompose(
                graph,
                marked,
                facts=state.facts,
                looped=state.looped,
                local_batch_norm=plan.semantics.batch_norm == "local",
                replicas=plan.instances,
                batch=static,
            )
            state = revise(state)
    outputs = [graph.anchors[f"output {name}"] for name in item.outputs]
    with run.step("cut"):
        reduced = cut.choose(state, outputs, unconditionally=bool(plan.homes) and len(plan.processes) > 1)
        reduced = by_shards(reduced, outputs)
        if reduced:
            state = revise(state, reduced=reduced)
        if _share_a_device(plan) and not plan.compresses and not plan.homes and mark_whole(state, plan.instances):
            state = revise(state)
        gathered = choose_gathers(state, outputs)
        if gathered:
            state = revise(state, reduced=gathered)
        if plan.homes and len(plan.processes) > 1 and (copies := copy_before_branches(graph, state)):
            state = revise(state)
            state = revise(state, reduced=[graph.nodes[name].output() for name in copies])
    return recompute(run, state, plan, outputs, item.variables), outputs


def _share_a_device(plan: Plan) -> bool:
    """Return whether all replicas run on one device."""
    if plan.microbatches > 1:  # a gradient of the whole batch would keep the activations of all micro-batches
        return False
    return len(plan.processes) == 1 and plan.replicas > 1 and len(set(run_devices(plan))) == 1


def _rewrite(
    item: GraphItem,
    plan: Plan,
    run: Run,
    training: bool,
    task: int,
    batch: int | None = None,
) -> GraphItem:
    graph, nodes_before, began = run.graph, len(run.graph), time.perf_counter()
    if not training:  # there is nothing to accumulate, and no gradient that tells where stages are
        plan = plan.without_stages()
    require_no_servers(plan)
    job, rank = plan, task
    if plan.is_asynchronous and len(plan.processes) > 1:
        plan, task = plan.alone(task), 0
    if plan.stage_hosts:  # all have the whole graph, which worker 0 runs
        task = 0
    feeds = frozenset(node.name for node in graph if node.op.startswith("Placeholder"))
    for name, info in item.outputs.items():
        graph.set_anchor(f"output {name}", graph.value(info.tensor))
    if any(given.whole for given in plan.batch_inputs):
        with run.step("own-parts"):
            item = take_own_parts(graph, item, plan, task)
    with run.step("prune"):
        prune(graph, _roots(graph, item))
    accesses = access_order(graph, [graph.nodes[name] for name in item.targets if name in graph.nodes])
    asked = plan.variables
    if any(variable.captured for variable in item.variables.values()):
        plan = within_reach(plan, task)
    sharded, plan = _in_shards(run, item, plan)
    item = sharded.with_(variables=shard_variables(sharded.variables))
    state, outputs = analyse(graph, item, plan, run)
    found = [Note(node.name, node.op, text) for node, text in notes(state)]
    inexact = tuple(Note(node.name, node.op, OF_PARTS) for node in block_statistics(state))
    shared = shared_by_size(item, plan, state)
    if plan.semantics.strict and found:
        raise PassError(
            f"{len(found)} ops have no rule, the first is {found[0].op} '{found[0].node}': {found[0].text}",
            hint="set semantics.strict to false to run them whole, which is correct but slower",
        )
    if plan.semantics.batch_norm == "local" and not inexact:
        found.append(Note("semantics.batch_norm", "local", IDLE))
    if training:
        require_training(graph, item, state)
    with run.step("resolve"):
        resolved = edge_list.resolve(plan, state, outputs, item.variables)
        plan = agreed(plan, resolved, state, item.with_(graph=graph))
        found += compress_choice.left_out(plan, state, item.variables)
        covered = _covered(job, plan, state, item, batch)
        plan = with_coverage(plan, covered)
    handles = frozenset(variable.handle for variable in item.variables.values())
    context = Context(graph, plan, state, frames_of(state.order), handles)
    if run.certificate is not None:
        run.certificate.claimed(graph, claims_of(state, outputs, plan))
    context.edges = {(edge.value, edge.to): edge for edge in plan.edges if not edge.role}
    context.owners = item.variables
    context.task = task
    context.rank, context.workers = rank, len(job.processes)
    context.served = served_by(plan, state, item.variables)
    source = measured_input(state)
    with run.step("reshard"):
        assign_spans(context)
        stages = assign_stages(context, outputs)
        keys = Keys(context)
        blocks = Blocks(context, source, state.whole_inputs[source], keys)
        reshard = Reshard(context, blocks, keys)
        reshard.run()
        add_digests(context, blocks)
        decorrelate(context)
        state_block_shapes(context)
        item = attach(context, item)
    with run.step("guard"):
        averages = averages_of(context)
        guard_empty_blocks(context, blocks, reshard.blocks_at)
        repeated = update_in_turn(context, reshard, averages, outputs, (*item.targets, *item.keep))
    common = {node for node in graph if node.span is Span.EACH and not _holds_own(context, node)}
    spread = _spread(state)
    with run.step("merge"):
        merge_outputs(context, reshard, outputs)
        effects = merge_kept(context, reshard, item.keep)
        moved = merge_targets(context, [*item.targets, *effects, *([item.init_op] if item.init_op else [])])
        name_resources(context)
        prune(graph, _roots(graph, item))
    if context.served.nodes:
        with run.step("serve"):
            if plan.is_asynchronous:
                lock_updates(context.served.nodes)
            name_served_roots(context, item)
            add_proxies(context, item)
    with run.step("order reads"):
        order_accesses(graph, accesses, repeated)
        order_reads(graph, [graph.nodes[name] for name in item.targets if name in graph.nodes])
    if context.served.nodes and context.workers > 1:
        with run.step("hand over"):
            hand_over(context, item)
            prune(graph, _roots(graph, item))
    if plan.looped:
        run.verify = run.verify and (lambda folded: check_folded(folded, plan.replicas_each, plan.all_devices))
        with run.step("loop"):
            if stages is None:
                loop_micro(graph, plan.replicas_each, plan.microbatches, context.slices, _roots(graph, item))
            else:
                loop_stages(graph, stages, plan, context.slices, _roots(graph, item))
    with run.step("place"):
        instances = place_instances(context, stages)
    if run.verify is not None and len(set(run_devices(plan))) > 1:
        check_arrivals(graph, {node.name for node in state.order}, on_other_replicas)
    found += [Note(*one) for one in (*item.notes, *run.recomputed.notes)]
    found += [Note(info.name, "input", OTHER_SIZE) for info in shared]
    found += [Note(node.name, node.op, MEETING) for node in instances.order.meetings]
    common &= set(graph)
    began_expand = time.perf_counter()
    data = expand(graph, instances, common)
    run.records.append(PassRecord("expand", time.perf_counter() - began_expand, 0, 0))
    each = sum(1 for node in graph if node.span is Span.EACH)
    report = Report(
        replace(plan, devices=job.devices, mode=job.mode, mesh=job.mesh, variables=asked),
        tuple(run.records),
        tuple(found),
        nodes_before,
        len(graph),
        len(graph) + each * (len(instances) - 1),
        time.perf_counter() - began,
        tuple(one.named() for one in context.compressed),
        task=rank,
        digests=digest_names(graph),
        homes=context.served.homes,
        held=held_bytes(graph, item.variables, run_devices(plan, task)),
        batches=named_groups(reshard.groups, item, state, shared),
        inexact=inexact,
        covered=covered,
        recomputed=run.recomputed,
    )
    layout = Layout(
        graph,
        common,
        spread,
        context.aliases,
        len(instances),
        feeds,
        moved=moved,
        partial=context.processes > 1,
        micro=instances.micro,
        hidden=plan.looped,
        interleaved=plan.interleaved,
    )
    inputs = own_inputs(item, plan, state, task)
    return item.with_(graph=None, data=data, report=report, layout=layout, inputs=inputs, variables=sharded.variables)


def _covered(job: Plan, plan: Plan, state: Propagation, item: GraphItem, batch: int | None) -> Coverage:
    """Measure how much of the step is divided over all devices of a job."""
    stages = plan.pipeline.stages if plan.pipeline is not None else 1
    return coverage_of(plan, state, item, parts=job.replicas * stages, batch=batch)


def _in_shards(run: Run, item: GraphItem, plan: Plan) -> tuple[GraphItem, Plan]:
    """Cut the variables of which the plan wants it; mostly that is none."""
    if not any(request.sizes for request in plan.variables):
        return item, plan
    with run.step("partition"):
        return partition(run.graph, item, plan)


def _roots(graph: Graph, item: GraphItem) -> list[Node]:
    """Return the nodes that the outside needs."""
    names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    names += [item.init_op] if item.init_op else []
    names += [info.tensor.partition(":")[0] for info in item.inputs.values()]
    names += item.keep
    for variable in item.variables.values():
        names += [variable.handle, *([variable.initializer] if variable.initializer else [])]
    return [*(graph.nodes[name] for name in dict.fromkeys(names) if name in graph.nodes), *digest_nodes(graph)]


def _holds_own(context: Context, node: Node) -> bool:
    """Return whether the instances of an EACH node hold different values."""
    answer = context.state.answers.get(node)
    if answer is None:  # made by a pass, for the replica that reads it
        return True
    return any(context.fact(node.output(i)).placement.differs for i in range(len(answer.outputs)))


def _spread(state: Propagation) -> dict[Value, Fact]:
    facts = ((value, state.source(value)) for value in state.facts)
    return {v: fact for v, fact in facts if fact.placement.differs and fact.placement not in (LOCAL, OWN_VALUE)}


def resolve(item: GraphItem, plan: Plan, batch: int | None = None) -> Plan:
    """Return the plan with the edges that follow from it on this graph, and its coverage; nothing is edited.

    Args:
        item: flat graph.
        plan: the request.
        batch: as for `rewrite`.

    Raises:
        GraphError: the graph has no batch input.
    """
    with no_garbage_collection():
        graph = item.graph.clone()
        item = take_own_parts(graph, item, plan)
        for name, info in item.outputs.items():
            graph.set_anchor(f"output {name}", graph.value(info.tensor))
        prune(graph, _roots(graph, item))
        own = plan.alone(0) if plan.is_asynchronous and len(plan.processes) > 1 else plan
        run = Run(graph)
        sharded, own = _in_shards(run, item, own)
        item = sharded.with_(variables=shard_variables(sharded.variables))
        state, outputs = analyse(graph, item, own, run)
        resolved = edge_list.resolve(own, state, outputs, item.variables)
        resolved = with_coverage(resolved, _covered(plan, resolved, state, item, batch))
        return replace(resolved, devices=plan.devices, mode=plan.mode, mesh=plan.mesh, variables=plan.variables)
