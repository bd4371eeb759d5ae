"""Complete the plan of a rewrite: every edge that needs a conversion, and how much of the step is divided."""

from __future__ import annotations

from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation, notes
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.report import Resolved
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.canonicalize import varying_values
from autograph_rewrite.passes.canonicalize.local_batch_norm import block_statistics
from autograph_rewrite.passes.canonicalize.variable_policies import Components
from autograph_rewrite.passes.local_sgd.train_alone import Alone, notes_of
from autograph_rewrite.plan.parts.messages import EdgePlan, Policy
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.batch import ragged_dims, shared_by_size
from autograph_rewrite.resolve.compression import skipped
from autograph_rewrite.resolve.coverage import coverage_of, with_coverage
from autograph_rewrite.resolve.edges import reshard_edges
from autograph_rewrite.resolve.given_plan import accept_user_edges
from autograph_rewrite.resolve.wire_types import sent_bytes, sizes_of

OF_PARTS = "statistics of each part of the batch, not of the whole (semantics.batch_norm: local)"
BY_REPLICA = "differs by replica (ar.replica_id)"
IDLE = "semantics.batch_norm is local, and nothing in this graph is a batch normalisation to which that applies"


def _said(policy: Policy) -> str:
    """Say how the updates of a variable differ from those on one device."""
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
    assumed = not (state.semantics.extent.units or rewrite.request.batch)
    parts = rewrite.job.replicas * stages
    covered = coverage_of(plan, state, item, parts=parts, sizes=sizes, assumed=assumed)
    rewrite.plan = with_coverage(plan, covered)
    rewrite.put(Resolved(tuple(found), inexact, shared, covered))


def _resolved(rewrite: Rewrite, state: Propagation, sizes: Sizes) -> Plan:
    """Return the plan with its edges, and with the lengths that may differ between processes."""
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


RESOLVE_PLAN = Pass("resolve-plan", _resolve, needs=(Propagation,), gives=(Resolved,))


# Bytes of the edges on the model axis, which need the number of examples of a step.


COUNTED = frozenset(
    ("add_n", "fold", "concat", "slice", "collective_reduce", "collective_gather", "collective_scatter", "zeros")
)
"""Lowerings that send a whole value; a halo exchange sends only some rows."""


def with_bytes(plan: Plan, state: Propagation, sizes: Sizes) -> Plan:
    """Return the plan with the bytes of model edges whose shapes had symbolic sizes."""
    return replace(plan, model_edges=tuple(_counted(edge, state, sizes) for edge in plan.model_edges))


def _counted(edge: EdgePlan, state: Propagation, sizes: Sizes) -> EdgePlan:
    if edge.bytes or edge.lowering not in COUNTED or edge.node not in state.graph.nodes:
        return edge
    value = state.graph.value(edge.value)
    return replace(edge, bytes=sent_bytes(state, value, sizes)) if value in state.facts else edge
