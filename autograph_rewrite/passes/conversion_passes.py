"""The passes that convert values as the plan says, until the folded graph is complete.

    insert-reshards ► exchange-digests ► ... ► pad-empty-blocks ► sequential-averages ► merge-instances
      ► parameter-servers ► order-accesses ► delegate-to-chief ► roll-loop

Everything here works on the folded graph, whose size does not depend on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.ir.replication import Mesh
from autograph_rewrite.ir.types.replica_marks import VARYING
from autograph_rewrite.ops.facts.placement import LOCAL, Fact
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.passes.base.claims import claims_of
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Pass, always
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.batch.decorrelate_randomness import decorrelate_randomness
from autograph_rewrite.passes.batch.localize_shapes import localize_shapes
from autograph_rewrite.passes.batch.pad_empty_blocks import pad_empty_blocks
from autograph_rewrite.passes.canonicalize.variable_policies import Components
from autograph_rewrite.passes.canonicalize.varying_values import fill_in
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.passes.compression.components import keep_components
from autograph_rewrite.passes.compression.compressor_state import attach
from autograph_rewrite.passes.emit.draw_before_writes import draw_before_writes
from autograph_rewrite.passes.emit.exchange_digests import exchange_digests
from autograph_rewrite.passes.emit.merge_instances import merge_instances, merge_kept, merge_targets
from autograph_rewrite.passes.emit.order_accesses import AccessOrder, order_accesses
from autograph_rewrite.passes.emit.per_replica_resources import name_resources
from autograph_rewrite.passes.emit.read_before_update import read_before_update
from autograph_rewrite.passes.local_sgd.step_count import keep_counts
from autograph_rewrite.passes.local_sgd.train_alone import Alone, trains_alone
from autograph_rewrite.passes.micro_batches.loop import roll_micro_batches
from autograph_rewrite.passes.micro_batches.sequential_averages import batch_statistic_averages, update_averages
from autograph_rewrite.passes.parameter_server.cached_reads import cache_reads
from autograph_rewrite.passes.parameter_server.delegate_to_chief import (
    delegate_to_chief,
    lock_updates,
    name_server_roots,
)
from autograph_rewrite.passes.pipeline_parallel.loop import roll_stages
from autograph_rewrite.passes.propagation_passes import Resolved
from autograph_rewrite.passes.reshard.insert_reshards import ReshardInserter, assign_spans
from autograph_rewrite.plan.parts.messages import SIZES
from autograph_rewrite.resolve.batch.batch_inputs import measured_input
from autograph_rewrite.resolve.server_region import find_server_region
from autograph_rewrite.resolve.stages.assignment import Stages, assign_stages


@dataclass(frozen=True)
class Averages:
    """The averages of statistics over blocks, by the node that makes them, as they were before anything was guarded."""

    values: Mapping[Node, Value]


@dataclass(frozen=True)
class Repeated:
    """Reads and updates that each micro-batch makes, one micro-batch after another."""

    nodes: frozenset[Node]


@dataclass(frozen=True)
class Merged:
    """What fetches by original name need to know.

    Attributes:
        common: nodes whose instances hold the same value.
        spread: facts of the original values whose instances differ.
        moved: new names of nodes whose names only wait for them now.
    """

    common: frozenset[Node]
    spread: Mapping[Value, Fact]
    moved: Mapping[str, str]


def _reshard(rewrite: Rewrite) -> None:
    """Insert the reshards: slice, add or all-reduce, concat or all-gather; sizes become local or global."""
    state, plan = rewrite.get(Propagation), rewrite.plan
    if rewrite.request.certificate is not None:
        rewrite.request.certificate.claimed(rewrite.graph, claims_of(state, rewrite.outputs, plan))
    context = _context(rewrite)
    assign_spans(context)
    stages = assign_stages(plan, state, rewrite.outputs, rewrite.item.variables)
    source = measured_input(state)
    keys = Keys(context)
    blocks = Blocks(context, source, state.whole_inputs[source], keys)
    reshard = ReshardInserter(context, blocks, keys)
    reshard.run()
    for found in (
        context,
        blocks,
        reshard,
        Averages(batch_statistic_averages(context)),
        *([stages] if stages is not None else []),
    ):
        rewrite.put(found)


def _context(rewrite: Rewrite) -> Context:
    """Return what all passes from here on share."""
    state, plan, variables = rewrite.get(Propagation), rewrite.plan, rewrite.item.variables
    return Context(
        rewrite.graph,
        plan,
        state,
        frames_of(state.order),
        frozenset(variable.handle for variable in variables.values()),
        task=rewrite.task,
        rank=rewrite.request.task,
        workers=len(rewrite.job.processes),
        owners=variables,
        edges={(edge.value, edge.to): edge for edge in plan.edges if not edge.role},
        server_region=find_server_region(plan, state, variables),
    )


def _number_replicas(rewrite: Rewrite) -> None:
    """Give each replica its number where the program asks for it."""
    fill_in(rewrite.get(Context))


def _has_varying_values(rewrite: Rewrite) -> bool:
    return any(VARYING in node.attrs for node in rewrite.get(Propagation).order)


def _keep_components(rewrite: Rewrite) -> None:
    """Keep each replica's component of a variable from step to step, unless somebody has written the variable."""
    keep_components(rewrite.get(Context), rewrite.get(Components))


def _has_components(rewrite: Rewrite) -> bool:
    return rewrite.has(Components) and bool(rewrite.get(Components).variables)


def _add_digests(rewrite: Rewrite) -> None:
    """Exchange digests of what the processes of a job were fed, with the sizes of their parts, and compare them."""
    exchange_digests(rewrite.get(Context), rewrite.get(Blocks), rewrite.targets)


def _is_in_a_job(rewrite: Rewrite) -> bool:
    """Return whether processes tell each other in each step what they were given."""
    edges = rewrite.get(Context).edges
    return len(rewrite.plan.processes) > 1 and (rewrite.get(Blocks).source.name, SIZES) in edges


def _is_alone(rewrite: Rewrite) -> bool:
    return rewrite.has(Alone)


def _count_steps(rewrite: Rewrite) -> None:
    """Count the steps between averages, and give each replica examples (`local_sgd`)."""
    keep_counts(rewrite.get(Context), rewrite.get(Blocks), rewrite.get(Alone))


def _decorrelate(rewrite: Rewrite) -> None:
    """Give each replica's random ops seeds of their own (`random: independent`)."""
    decorrelate_randomness(rewrite.get(Context))


def _state_block_shapes(rewrite: Rewrite) -> None:
    """State the shapes of blocks in the attributes of tensor arrays and lists."""
    localize_shapes(rewrite.get(Context))


def _attach_state(rewrite: Rewrite) -> None:
    """Declare the variables that passes have added, such as the residuals of compressors."""
    rewrite.item = attach(rewrite.get(Context), rewrite.item)


def _guard(rewrite: Rewrite) -> None:
    """Pad empty blocks for kernels that cannot take one (a last batch smaller than N)."""
    context = rewrite.get(Context)
    pad_empty_blocks(context, rewrite.get(Blocks), rewrite.get(ReshardInserter).blocks_at)


def _may_be_empty(rewrite: Rewrite) -> bool:
    return not trains_alone(rewrite)


def _update_averages(rewrite: Rewrite) -> None:
    """Apply moving-average updates sequentially, one per micro-batch."""
    averages, named = rewrite.get(Averages).values, (*rewrite.item.targets, *rewrite.item.keep)
    nodes = update_averages(rewrite.get(Context), rewrite.get(ReshardInserter), averages, rewrite.outputs, named)
    rewrite.put(Repeated(frozenset(nodes)))


def _merge(rewrite: Rewrite) -> None:
    """Give outputs, train op and initialiser one node each, under their original names."""
    context, reshard, item = rewrite.get(Context), rewrite.get(ReshardInserter), rewrite.item
    common = {node for node in rewrite.graph if node.span is not Span.ONCE and not _differs(context, node)}
    spread = _spread(context.state)
    merge_instances(context, reshard, rewrite.outputs)
    effects = merge_kept(context, reshard, item.keep)
    moved = merge_targets(context, [*item.targets, *effects, *([item.init_op] if item.init_op else [])])
    name_resources(context)
    eliminate_dead_code(rewrite.graph, rewrite.roots)
    rewrite.put(Merged(frozenset(common), spread, moved))


def _differs(context: Context, node: Node) -> bool:
    """Return whether the instances of a node hold different values."""
    transferred = context.state.transfers.get(node)
    if transferred is None:  # made by a pass, for the replica that reads it
        return True
    return any(context.fact(node.output(i)).placement.differs for i in range(len(transferred.outputs)))


def _spread(state: Propagation) -> dict[Value, Fact]:
    facts = ((value, state.source(value)) for value in state.facts)
    return {v: fact for v, fact in facts if fact.placement.differs and fact.placement not in (LOCAL, OWN_VALUE)}


def _serve(rewrite: Rewrite) -> None:
    """Name and lock what runs on parameter servers, and add local copies of what is read there."""
    context = rewrite.get(Context)
    if rewrite.plan.is_asynchronous:
        lock_updates(context.server_region.nodes)
    name_server_roots(context, rewrite.item)
    cache_reads(context, rewrite.item)


def _is_served(rewrite: Rewrite) -> bool:
    return bool(rewrite.get(Context).server_region.nodes)


def _order_reads(rewrite: Rewrite) -> None:
    """Restore the original's order of reads and updates wherever conversions have lost it."""
    repeated = rewrite.get(Repeated).nodes if rewrite.has(Repeated) else ()
    order_accesses(rewrite.graph, rewrite.get(AccessOrder), repeated)
    read_before_update(rewrite.graph, rewrite.targets, [value.node for value in rewrite.outputs])


def _hand_over(rewrite: Rewrite) -> None:
    """Run parameter-server ops on worker 0 only; the others get completion tokens and the values that they read."""
    delegate_to_chief(rewrite.get(Context), rewrite.item)
    eliminate_dead_code(rewrite.graph, rewrite.roots)


def _is_served_to_others(rewrite: Rewrite) -> bool:
    return _is_served(rewrite) and rewrite.get(Context).workers > 1


def _draw_first(rewrite: Rewrite) -> None:
    """Let every write wait for what the step draws: the step in which the data end does nothing (`steps_per_run`)."""
    draw_before_writes(rewrite.graph, rewrite.targets)


def _does_several_steps(rewrite: Rewrite) -> bool:
    return rewrite.plan.steps_per_run > 1


def _roll(rewrite: Rewrite) -> None:
    """Make the micro-batches the iterations of a loop (`form: loop`)."""
    graph, plan, slices = rewrite.graph, rewrite.plan, rewrite.get(Context).slices
    rewrite.is_rolled = True
    if rewrite.has(Stages):
        roll_stages(graph, rewrite.get(Stages), plan, slices, rewrite.roots)
    else:
        roll_micro_batches(graph, Mesh(plan.replicas_each, plan.microbatches), slices, rewrite.roots)


def _is_looped(rewrite: Rewrite) -> bool:
    return rewrite.plan.looped


CONVERSION = (
    Pass(
        "insert-reshards",
        _reshard,
        always,
        (Propagation, Resolved),
        (Context, Blocks, ReshardInserter, Stages, Averages),
    ),
    Pass("number-replicas", _number_replicas, _has_varying_values, (Context,)),
    Pass("exchange-digests", _add_digests, _is_in_a_job, (Context, Blocks)),
    Pass("decorrelate-randomness", _decorrelate, needs=(Context,)),
    Pass("localize-shapes", _state_block_shapes, needs=(Context,)),
    Pass("keep-components", _keep_components, _has_components, (Context,)),
    Pass("count-steps", _count_steps, _is_alone, (Context, Blocks)),
    Pass("declare-state", _attach_state, needs=(Context,)),
    Pass("pad-empty-blocks", _guard, _may_be_empty, (Context, Blocks, ReshardInserter)),
    Pass("sequential-averages", _update_averages, needs=(Context, ReshardInserter, Averages), gives=(Repeated,)),
    Pass("merge-instances", _merge, needs=(Context, ReshardInserter), gives=(Merged,)),
    Pass("parameter-servers", _serve, _is_served, (Context,)),
    Pass("order-accesses", _order_reads, needs=(AccessOrder,)),
    Pass("delegate-to-chief", _hand_over, _is_served_to_others, (Context,)),
    Pass("draw-before-writes", _draw_first, _does_several_steps),
    Pass("roll-loop", _roll, _is_looped, (Context,)),
)
