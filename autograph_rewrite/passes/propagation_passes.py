"""The passes up to the plan: batch slicing, variable sharding, propagation, canonicalisation, resolution.

    slice-batch-inputs ► eliminate-dead-code ► shard-variables ► propagate ► split-draws ► decompose
      ► place-reductions ► rematerialize ► resolve-plan

From `propagate` on every value has a placement; nothing is converted before `resolve-plan` has listed every edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autograph_rewrite.analysis import reduction_placement
from autograph_rewrite.analysis.facts.concrete_sizes import Sizes
from autograph_rewrite.analysis.gather_placement import choose_gathers
from autograph_rewrite.analysis.propagate import Propagation, notes, revise
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.run_writes import Written, writes_of
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.batch.slice_batch_inputs import slice_batch_inputs
from autograph_rewrite.passes.batch.split_draws import split_draws
from autograph_rewrite.passes.canonicalize import decompose, varying_values
from autograph_rewrite.passes.canonicalize.compute_once import compute_once
from autograph_rewrite.passes.canonicalize.hoist_gathers import hoist_gathers
from autograph_rewrite.passes.canonicalize.local_batch_norm import block_statistics, localize_batch_norm
from autograph_rewrite.passes.canonicalize.variable_policies import Components, follow_policies
from autograph_rewrite.passes.emit.order_accesses import AccessOrder, access_order
from autograph_rewrite.passes.local_sgd.train_alone import Alone, notes_of, train_alone, trains_alone
from autograph_rewrite.passes.localize.dynamic_partition import mark_dynamic_partitions
from autograph_rewrite.passes.localize.gather_for_outputs import gather_for_outputs
from autograph_rewrite.passes.localize.localize_indices import localize_indices
from autograph_rewrite.passes.localize.localize_kept_rows import localize_kept_rows
from autograph_rewrite.passes.preconditions import require_training
from autograph_rewrite.passes.rematerialize import recompute
from autograph_rewrite.passes.tensor_parallel.partition import partition
from autograph_rewrite.passes.variable_sharding.pieces import in_pieces, shard_variables
from autograph_rewrite.passes.variable_sharding.shard_variables import by_shards, shard_variables_of
from autograph_rewrite.plan.parts.messages import Policy
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import run_devices, within_reach
from autograph_rewrite.resolve.batch.batch_inputs import batch_values, shared_by_size
from autograph_rewrite.resolve.batch.ragged_dims import ragged_dims
from autograph_rewrite.resolve.compression import skipped
from autograph_rewrite.resolve.coverage import Coverage, with_coverage
from autograph_rewrite.resolve.divided_work import coverage_of
from autograph_rewrite.resolve.edges import reshard_edges
from autograph_rewrite.resolve.edges.exchanged_bytes import with_bytes
from autograph_rewrite.resolve.given_plan import accept_user_edges
from autograph_rewrite.resolve.remat.decision import Decision
from autograph_rewrite.resolve.segmentable import propagate_parts
from autograph_rewrite.resolve.stated_placements import taken_as_given, with_stated
from autograph_rewrite.resolve.wire_types import sizes_of
from autograph_rewrite.training_graph import TensorInfo, Variable

MAX_DECOMPOSITIONS = 8
OF_PARTS = "statistics of each part of the batch, not of the whole (semantics.batch_norm: local)"
BY_REPLICA = "differs by replica (ar.replica_id)"
IDLE = "semantics.batch_norm is local, and nothing in this graph is a batch normalisation to which that applies"


@dataclass(frozen=True)
class Sharded:
    """The item's variables as the outside knows them, those in shards among them."""

    variables: Mapping[str, Variable]


@dataclass(frozen=True)
class Resolved:
    """What is known of the step before anything is converted.

    Attributes:
        notes: what costs speed.
        inexact: what is another quantity than on one device.
        shared: batch inputs that every replica has all of.
        covered: how much of the step is divided.
    """

    notes: tuple[Note, ...]
    inexact: tuple[Note, ...]
    shared: tuple[TensorInfo, ...]
    covered: Coverage


def _own_parts(rewrite: Rewrite) -> None:
    """Slice batch inputs that every process produces in full to this process's rows."""
    rewrite.item = slice_batch_inputs(rewrite.graph, rewrite.item, rewrite.plan, rewrite.task)


def _has_whole_inputs(rewrite: Rewrite) -> bool:
    return any(given.whole for given in rewrite.plan.batch_inputs)


@dataclass(frozen=True)
class Recorded:
    """What runs of the original write, and the names of its nodes."""

    writes: Written
    nodes: frozenset[str]


def _prune(rewrite: Rewrite) -> None:
    """Drop what no output, target or initialiser needs; record what runs write, and in which order."""
    eliminate_dead_code(rewrite.graph, rewrite.roots)
    rewrite.put(access_order(rewrite.graph, rewrite.targets))
    rewrite.put(Recorded(writes_of(rewrite.graph), frozenset(rewrite.graph.nodes)))


def _within_reach(rewrite: Rewrite) -> None:
    """Keep the variables that a function has captured on devices of this process."""
    rewrite.plan = within_reach(rewrite.plan, rewrite.task)


def _has_captures(rewrite: Rewrite) -> bool:
    return any(variable.captured for variable in rewrite.item.variables.values())


def _partition(rewrite: Rewrite) -> None:
    """Shard variables, their slots and their updates."""
    known = rewrite.get(Sharded).variables if rewrite.has(Sharded) else rewrite.item.variables
    item, rewrite.plan = shard_variables_of(rewrite.graph, rewrite.item, rewrite.plan)
    rewrite.put(Sharded(in_pieces(known, item.variables)))  # the model axis may have cut others
    rewrite.item = replace(item, variables=shard_variables(item.variables))


def _cut_model(rewrite: Rewrite) -> None:
    """Cut tensors into blocks for the logical devices of each replica, and what is computed of them."""
    item, rewrite.plan = partition(rewrite.graph, rewrite.item, rewrite.plan, rewrite.task)
    rewrite.put(Sharded(item.variables))
    rewrite.item = replace(item, variables=shard_variables(item.variables))
    rewrite.put(access_order(rewrite.graph, rewrite.targets))


def _has_model_axis(rewrite: Rewrite) -> bool:
    return rewrite.plan.model is not None


def _has_shards(rewrite: Rewrite) -> bool:
    return any(request.sizes for request in rewrite.plan.variables)


def _mark_replicas(rewrite: Rewrite) -> None:
    """Let `ar.replica_id` and `ar.num_replicas` stand for what they are on several replicas."""
    varying_values.mark_replicas(rewrite.graph, rewrite.plan)


def _asks_about_replicas(rewrite: Rewrite) -> bool:
    return varying_values.has_marks(rewrite.graph)


def _may_vary(rewrite: Rewrite) -> bool:
    return _asks_about_replicas(rewrite) or _has_policies(rewrite)


def _follow_policies(rewrite: Rewrite) -> None:
    """Let updates of variables mean what their policies say: merged when written, or a component of each replica."""
    item = rewrite.item
    step = [*rewrite.targets, *(value.node for value in rewrite.outputs)]
    state, found = follow_policies(rewrite.get(Propagation), rewrite.plan, item.variables, step)
    eliminate_dead_code(rewrite.graph, rewrite.roots)
    rewrite.put(access_order(rewrite.graph, rewrite.targets))
    rewrite.put(revise(state))
    rewrite.put(found)


def _has_policies(rewrite: Rewrite) -> bool:
    return bool(rewrite.plan.policies)


def _merge_varying(rewrite: Rewrite) -> None:
    """Add up what differs between replicas where `ar.all_reduce` says so; refuse it where one value counts for all."""
    state = varying_values.add_up(rewrite.get(Propagation), rewrite.plan)
    owners = {variable.handle: name for name, variable in rewrite.item.variables.items()}
    varying_values.require_apart(state, rewrite.outputs, owners)
    rewrite.put(state)


def _propagate(rewrite: Rewrite) -> None:
    """Give every value its placement: replicated, split along a dimension, or partial (the replicas add up)."""
    state = _propagated(rewrite)
    rewrite.put(with_stated(state, rewrite.item.placements) if rewrite.item.placements else state)


def take_placements_as_given(rewrite: Rewrite) -> None:
    """Give values the placements that the item states, and others those that follow from them; for `opt` alone."""
    rewrite.put(taken_as_given(_propagated(rewrite), rewrite.item.placements))


def _propagated(rewrite: Rewrite) -> Propagation:
    mark_dynamic_partitions(rewrite.graph)
    batch, static = batch_values(rewrite.graph, rewrite.item, rewrite.plan)
    return propagate_parts(rewrite.graph, batch, static, rewrite.plan)


def _cut_draws(rewrite: Rewrite) -> None:
    """Replicate random numbers only where they are drawn, and split them afterwards."""
    rewrite.put(split_draws(rewrite.get(Propagation)))


def _mark_statistics(rewrite: Rewrite) -> None:
    """Mark the batch normalisations whose statistics are to be those of each micro-batch (`batch_norm: local`)."""
    rewrite.put(localize_batch_norm(rewrite.get(Propagation), rewrite.plan.instances))


def _has_local_statistics(rewrite: Rewrite) -> bool:
    """Replicas alone divide fused batch norms only."""
    return rewrite.plan.semantics.batch_norm == "local" and rewrite.plan.microbatches > 1


def _localize_indices(rewrite: Rewrite) -> None:
    """Make row indices relative to the local block instead of to the global batch."""
    rewrite.put(localize_indices(rewrite.graph, rewrite.get(Propagation)))


def _localize_kept(rewrite: Rewrite) -> None:
    """Number the rows that a mask keeps within the local block instead of within the global batch."""
    rewrite.put(localize_kept_rows(rewrite.graph, rewrite.get(Propagation), ordered=not rewrite.plan.interleaved))


def _has_micro_batches(rewrite: Rewrite) -> bool:
    return rewrite.plan.microbatches > 1


def _decompose(rewrite: Rewrite) -> None:
    """Turn ops that mix examples (mean, batch norm...) into sums that add up."""
    for _ in range(MAX_DECOMPOSITIONS):
        state, marked = rewrite.get(Propagation), _marked(rewrite)
        if not marked:
            return
        own = rewrite.plan.semantics.batch_norm == "local"
        blocks = decompose.Blocks(rewrite.plan.instances, state.semantics.batch, own)
        decompose.decompose(rewrite.graph, marked, facts=state.facts, looped=state.looped, blocks=blocks)
        rewrite.put(revise(state))
    if marked := _marked(rewrite):
        raise PassError(f"op {marked[0].op} still mixes examples after it was decomposed", node=marked[0])


def _marked(rewrite: Rewrite) -> list[Node]:
    """Return the nodes that mix examples."""
    return [node for node, transferred in rewrite.get(Propagation).transfers.items() if transferred.decompose]


def _mixes_examples(rewrite: Rewrite) -> bool:
    return bool(_marked(rewrite))


def _cut(rewrite: Rewrite) -> None:
    """Decide where partial values are summed and rows gathered, so that few bytes travel (a minimum cut)."""
    graph, plan, outputs = rewrite.graph, rewrite.plan, rewrite.outputs
    state, crosses = rewrite.get(Propagation), bool(plan.homes) and len(plan.processes) > 1
    fixed = varying_values.read_with_own(state)
    reduced = reduction_placement.place_reductions(state, outputs, unconditionally=crosses)
    reduced = by_shards({value for value in reduced if value.node not in fixed}, outputs)
    if reduced:
        state = revise(state, reduced=reduced)
    is_once = _share_a_device(plan) and not plan.compresses and not plan.homes and not fixed
    if is_once and compute_once(state, plan.instances):
        state = revise(state)
    gathered = {value for value in choose_gathers(state, outputs) if value.node not in fixed}
    if gathered:
        state = revise(state, reduced=gathered)
    if copies := () if fixed else hoist_gathers(graph, state, plan):
        state = revise(state)
        state = revise(state, reduced=[graph.nodes[name].output() for name in copies])
    rewrite.put(state)


def _share_a_device(plan: Plan) -> bool:
    """Return whether all replicas run on one device."""
    if plan.microbatches > 1:  # a gradient of the whole batch would keep the activations of all micro-batches
        return False
    return len(plan.processes) == 1 and plan.replicas > 1 and len(set(run_devices(plan))) == 1


def _observe(rewrite: Rewrite) -> None:
    """Compute on the gathered batch what only outputs need, instead of at a barrier between micro-batches."""
    state = rewrite.get(Propagation)
    if gather_for_outputs(state, rewrite.targets):
        rewrite.put(revise(state))


def _cannot_wait(rewrite: Rewrite) -> bool:
    return rewrite.plan.pipeline is not None or rewrite.plan.looped


def _rematerialize(rewrite: Rewrite) -> None:
    """Recompute activations for the gradients that need them, instead of keeping them (`remat`)."""
    assert rewrite.plan.remat is not None
    decision, state = recompute(rewrite, rewrite.plan.remat)
    rewrite.put(decision)
    rewrite.put(state)


def _is_recomputed(rewrite: Rewrite) -> bool:
    return rewrite.plan.remat is not None


def _require(rewrite: Rewrite) -> None:
    """Refuse ops without a rule under `strict`, and graphs that there is nothing to distribute in."""
    state = rewrite.get(Propagation)
    found = notes(state)
    if rewrite.plan.semantics.strict and found:
        node, text = found[0]
        many = f"{len(found)} ops have no rule, the first is " if len(found) > 1 else "an op has no rule: "
        raise PassError(
            f"{many}{node.op} '{node.name}': {text}",
            hint="set semantics.strict to false to run them whole, which is correct but slower",
        )
    if rewrite.request.training:
        require_training(rewrite.graph, rewrite.item, state)


def _said(policy: Policy) -> str:
    """Say what a variable is updated with that is not what one device computes."""
    by = "the program" if policy.declared else "variable_policies"
    if policy.has_components:
        return f"each replica has a component of its own, from its part of the batch; read: {policy.aggregation} ({by})"
    return f"updated with what replicas compute of their parts of the batch: {policy.aggregation} ({by})"


def _resolve(rewrite: Rewrite) -> None:
    """Complete the plan: every edge that needs a conversion, with owner, lowering, bytes and reason."""
    state, item = rewrite.get(Propagation), rewrite.item
    shared = tuple(shared_by_size(item, rewrite.plan, state))
    inexact = tuple(Note(node.name, node.op, OF_PARTS) for node in block_statistics(state))
    inexact += tuple(Note(node.name, node.op, BY_REPLICA) for node in varying_values.uses_of_ids(state))
    changed = rewrite.get(Components).inexact if rewrite.has(Components) else {}
    inexact += tuple(Note(policy.variable, node.op, _said(policy)) for node, policy in changed.items())
    inexact += tuple(notes_of(rewrite.get(Alone), item.variables)) if rewrite.has(Alone) else ()
    found = [Note(node.name, node.op, text) for node, text in notes(state)]
    if rewrite.plan.semantics.batch_norm == "local" and not any(note.text == OF_PARTS for note in inexact):
        found.append(Note("semantics.batch_norm", "local", IDLE))
    sizes = sizes_of(rewrite.job, state, rewrite.request.batch)
    resolved = _resolved(rewrite, state, sizes)
    plan = accept_user_edges(rewrite.plan, resolved, state, replace(item, source=rewrite.graph))
    plan = with_bytes(plan, state, sizes)
    found += skipped(plan, state, item.variables)
    stages = plan.pipeline.stages if plan.pipeline is not None else 1
    assumed = not (state.semantics.batch or rewrite.request.batch)
    parts = rewrite.job.replicas * stages
    covered = coverage_of(plan, state, item, parts=parts, sizes=sizes, assumed=assumed)
    rewrite.plan = with_coverage(plan, covered)
    rewrite.put(Resolved(tuple(found), inexact, shared, covered))


def _resolved(rewrite: Rewrite, state: Propagation, sizes: Sizes) -> Plan:
    """Return the plan with its edges, and which lengths may differ between processes."""
    variables, outputs = rewrite.item.variables, list(rewrite.outputs)
    plan = reshard_edges.resolve_edges(rewrite.plan, state, outputs, variables, sizes)
    if len(plan.processes) == 1 or plan.padding == "equal":
        return plan
    tensors = {given.name: rewrite.item.inputs[given.name].tensor for given in plan.batch_inputs if not given.whole}
    by_name = {value.name: value for value in state.whole_inputs}
    inputs = {name: by_name[key] for name, t in tensors.items() if (key := t.removesuffix(":0")) in by_name}
    lengths = ragged_dims(state, plan.edges, outputs, inputs)
    if lengths.padded:
        plan = reshard_edges.resolve_edges(plan, state, outputs, variables, sizes, padded=lengths.padded)
    given = tuple(replace(one, ragged=lengths.inputs.get(one.name, ())) for one in plan.batch_inputs)
    return replace(plan, batch_inputs=given, notes=(*plan.notes, *lengths.notes))


ANALYSIS = (
    Pass("propagate", _propagate, gives=(Propagation,)),
    Pass("train-alone", train_alone, trains_alone, (Propagation,), (Propagation, Alone)),
    Pass("variable-policies", _follow_policies, _has_policies, (Propagation,), (Propagation, Components)),
    Pass("merge-varying", _merge_varying, _may_vary, (Propagation,), (Propagation,)),
    Pass("split-draws", _cut_draws, needs=(Propagation,), gives=(Propagation,)),
    Pass("local-batch-norm", _mark_statistics, _has_local_statistics, (Propagation,), (Propagation,)),
    Pass("localize-indices", _localize_indices, _has_micro_batches, (Propagation,), (Propagation,)),
    Pass("localize-kept-rows", _localize_kept, _has_micro_batches, (Propagation,), (Propagation,)),
    Pass("decompose", _decompose, _mixes_examples, (Propagation,), (Propagation,)),
    Pass("place-reductions", _cut, needs=(Propagation,), gives=(Propagation,)),
    Pass("gather-for-outputs", _observe, _cannot_wait, (Propagation,), (Propagation,)),
    Pass("rematerialize", _rematerialize, _is_recomputed, (Propagation,), (Propagation, Decision)),
)
"""From a graph to its placements."""

WITHIN_REACH = Pass("bind-captures", _within_reach, _has_captures)
REQUIRE = Pass("check-training", _require, needs=(Propagation,))
"""What a rewrite refuses, and a plan may still say."""

PROPAGATION = (
    Pass("slice-batch-inputs", _own_parts, _has_whole_inputs),
    Pass("eliminate-dead-code", _prune, gives=(AccessOrder, Recorded)),
    WITHIN_REACH,
    Pass("partition-model", _cut_model, _has_model_axis, gives=(Sharded,)),
    Pass("shard-variables", _partition, _has_shards, gives=(Sharded,)),
    Pass("mark-replicas", _mark_replicas, _asks_about_replicas),
    *ANALYSIS,
    REQUIRE,
    Pass("resolve-plan", _resolve, needs=(Propagation,), gives=(Resolved,)),
)
PLANNING = tuple(one for one in PROPAGATION if one not in (WITHIN_REACH, REQUIRE))
"""From a graph to its plan: variables stay on the devices that the plan names."""
