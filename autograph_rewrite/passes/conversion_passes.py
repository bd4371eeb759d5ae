"""The passes that convert values as the plan says, until the folded graph is complete.

    insert-reshards ► exchange-digests ► ... ► pad-empty-blocks ► sequential-averages ► merge-instances
      ► parameter-servers ► order-accesses ► delegate-to-chief ► roll-loop

Everything here works on the folded graph, whose size does not depend on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autograph_rewrite.analysis.fact import LOCAL, Fact
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.rules.base import OWN_VALUE
from autograph_rewrite.ir.frames import frames_of
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.added import attach
from autograph_rewrite.passes.batch import measured_input
from autograph_rewrite.passes.block_shapes import state_block_shapes
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.claims import claims_of
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.decorrelate import decorrelate
from autograph_rewrite.passes.digests import add_digests
from autograph_rewrite.passes.guard import guard_empty_blocks
from autograph_rewrite.passes.hand_over import hand_over, lock_updates, name_served_roots
from autograph_rewrite.passes.in_turn import averages_of, update_in_turn
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.loop_micro import loop_micro
from autograph_rewrite.passes.loop_stages import loop_stages
from autograph_rewrite.passes.merge import merge_kept, merge_outputs, merge_targets
from autograph_rewrite.passes.mirror import name_resources
from autograph_rewrite.passes.order_accesses import AccessOrder, order_accesses
from autograph_rewrite.passes.order_reads import order_reads
from autograph_rewrite.passes.pass_manager import Pass, always
from autograph_rewrite.passes.propagation_passes import Resolved
from autograph_rewrite.passes.proxies import add_proxies
from autograph_rewrite.passes.prune import prune
from autograph_rewrite.passes.reshard import Reshard, assign_spans
from autograph_rewrite.passes.rewriting import Rewrite
from autograph_rewrite.passes.served import served_by
from autograph_rewrite.passes.stages import Stages, assign_stages


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
    """Put the conversions in: slice, add or all-reduce, concat or gather; sizes become local or global."""
    state, plan = rewrite.get(Propagation), rewrite.plan
    if rewrite.request.certificate is not None:
        rewrite.request.certificate.claimed(rewrite.graph, claims_of(state, rewrite.outputs, plan))
    context = _context(rewrite)
    assign_spans(context)
    stages = assign_stages(context, rewrite.outputs)
    source = measured_input(state)
    keys = Keys(context)
    blocks = Blocks(context, source, state.whole_inputs[source], keys)
    reshard = Reshard(context, blocks, keys)
    reshard.run()
    for found in (context, blocks, reshard, Averages(averages_of(context)), *([stages] if stages is not None else [])):
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
        served=served_by(plan, state, variables),
    )


def _add_digests(rewrite: Rewrite) -> None:
    """Let the processes of a job compare what they were given, with the sizes of their parts."""
    add_digests(rewrite.get(Context), rewrite.get(Blocks))


def _is_in_a_job(rewrite: Rewrite) -> bool:
    return len(rewrite.plan.processes) > 1


def _decorrelate(rewrite: Rewrite) -> None:
    """Give the ops that draw for each replica seeds of their own (`random: independent`)."""
    decorrelate(rewrite.get(Context))


def _state_block_shapes(rewrite: Rewrite) -> None:
    """State the shapes of blocks in the attributes of arrays and lists."""
    state_block_shapes(rewrite.get(Context))


def _attach_state(rewrite: Rewrite) -> None:
    """Declare the variables that passes have added, such as the residuals of compressors."""
    rewrite.item = attach(rewrite.get(Context), rewrite.item)


def _guard(rewrite: Rewrite) -> None:
    """Keep kernels that cannot take an empty block from getting one (a last batch smaller than N)."""
    context = rewrite.get(Context)
    guard_empty_blocks(context, rewrite.get(Blocks), rewrite.get(Reshard).blocks_at)


def _update_averages(rewrite: Rewrite) -> None:
    """Let each micro-batch update moving averages after the one before it."""
    averages, named = rewrite.get(Averages).values, (*rewrite.item.targets, *rewrite.item.keep)
    nodes = update_in_turn(rewrite.get(Context), rewrite.get(Reshard), averages, rewrite.outputs, named)
    rewrite.put(Repeated(frozenset(nodes)))


def _merge(rewrite: Rewrite) -> None:
    """Give outputs, train op and initialiser one node each, under their original names."""
    context, reshard, item = rewrite.get(Context), rewrite.get(Reshard), rewrite.item
    common = {node for node in rewrite.graph if node.span is Span.EACH and not _differs(context, node)}
    spread = _spread(context.state)
    merge_outputs(context, reshard, rewrite.outputs)
    effects = merge_kept(context, reshard, item.keep)
    moved = merge_targets(context, [*item.targets, *effects, *([item.init_op] if item.init_op else [])])
    name_resources(context)
    prune(rewrite.graph, rewrite.roots)
    rewrite.put(Merged(frozenset(common), spread, moved))


def _differs(context: Context, node: Node) -> bool:
    """Return whether the instances of an EACH node hold different values."""
    answer = context.state.answers.get(node)
    if answer is None:  # made by a pass, for the replica that reads it
        return True
    return any(context.fact(node.output(i)).placement.differs for i in range(len(answer.outputs)))


def _spread(state: Propagation) -> dict[Value, Fact]:
    facts = ((value, state.source(value)) for value in state.facts)
    return {v: fact for v, fact in facts if fact.placement.differs and fact.placement not in (LOCAL, OWN_VALUE)}


def _serve(rewrite: Rewrite) -> None:
    """Name and lock what runs on parameter servers, and add local copies of what is read there."""
    context = rewrite.get(Context)
    if rewrite.plan.is_asynchronous:
        lock_updates(context.served.nodes)
    name_served_roots(context, rewrite.item)
    add_proxies(context, rewrite.item)


def _is_served(rewrite: Rewrite) -> bool:
    return bool(rewrite.get(Context).served.nodes)


def _order_reads(rewrite: Rewrite) -> None:
    """Restore the original's order of reads and updates wherever conversions have lost it."""
    repeated = rewrite.get(Repeated).nodes if rewrite.has(Repeated) else ()
    order_accesses(rewrite.graph, rewrite.get(AccessOrder), repeated)
    order_reads(rewrite.graph, rewrite.targets)


def _hand_over(rewrite: Rewrite) -> None:
    """Leave parameter-server ops to worker 0; the others get tokens and the values that they read."""
    hand_over(rewrite.get(Context), rewrite.item)
    prune(rewrite.graph, rewrite.roots)


def _is_served_to_others(rewrite: Rewrite) -> bool:
    return _is_served(rewrite) and rewrite.get(Context).workers > 1


def _roll(rewrite: Rewrite) -> None:
    """Make the micro-batches the iterations of a loop (`form: loop`)."""
    graph, plan, slices = rewrite.graph, rewrite.plan, rewrite.get(Context).slices
    rewrite.is_rolled = True
    if rewrite.has(Stages):
        loop_stages(graph, rewrite.get(Stages), plan, slices, rewrite.roots)
    else:
        loop_micro(graph, plan.replicas_each, plan.microbatches, slices, rewrite.roots)


def _is_looped(rewrite: Rewrite) -> bool:
    return rewrite.plan.looped


CONVERSION = (
    Pass("insert-reshards", _reshard, always, (Propagation, Resolved), (Context, Blocks, Reshard, Stages, Averages)),
    Pass("exchange-digests", _add_digests, _is_in_a_job, (Context, Blocks)),
    Pass("decorrelate-randomness", _decorrelate, needs=(Context,)),
    Pass("localize-shapes", _state_block_shapes, needs=(Context,)),
    Pass("declare-state", _attach_state, needs=(Context,)),
    Pass("pad-empty-blocks", _guard, needs=(Context, Blocks, Reshard)),
    Pass("sequential-averages", _update_averages, needs=(Context, Reshard, Averages), gives=(Repeated,)),
    Pass("merge-instances", _merge, needs=(Context, Reshard), gives=(Merged,)),
    Pass("parameter-servers", _serve, _is_served, (Context,)),
    Pass("order-accesses", _order_reads, needs=(AccessOrder,)),
    Pass("delegate-to-chief", _hand_over, _is_served_to_others, (Context,)),
    Pass("roll-loop", _roll, _is_looped, (Context,)),
)
