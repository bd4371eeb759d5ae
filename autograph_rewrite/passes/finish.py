"""The distributed item of a rewrite that has run every pass: its graph, its layout and its report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.run_writes import RunWrites, compared, original_name
from autograph_rewrite.passes.base.anchors import digest_names
from autograph_rewrite.passes.base.report import Report, Resolved
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.expand import Expanded
from autograph_rewrite.passes.emit.merge_instances import Merged
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from autograph_rewrite.passes.emit.tensor_map import Layout
from autograph_rewrite.passes.local_sgd.train_alone import Alone
from autograph_rewrite.passes.prune import Recorded
from autograph_rewrite.passes.reshard.insert_reshards import Reshards
from autograph_rewrite.passes.variable_sharding.pieces import WholeVariables
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.plan.variable_policies import described
from autograph_rewrite.resolve.batch.batch_inputs import named_groups, own_inputs
from autograph_rewrite.resolve.remat.activations import Decision
from autograph_rewrite.training_graph import EncodedGraph, TrainingGraph, Variable

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
        variables=variables,
    )


def _report(rewrite: Rewrite) -> Report:
    graph, item, plan, job = rewrite.graph, rewrite.item, rewrite.plan, rewrite.job
    resolved, rewrite, instances = rewrite.get(Resolved), rewrite, rewrite.get(ReplicaLayout)
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
        held=held_bytes(graph, item.variables, run_devices(plan, rewrite.task)),
        batches=named_groups(rewrite.get(Reshards).groups, item, rewrite.get(Propagation), resolved.shared),
        inexact=resolved.inexact,
        alone=rewrite.get(Alone).own.variables if rewrite.has(Alone) else (),
        averaged=tuple(rewrite.get(Alone).averages.averaged) if rewrite.has(Alone) else (),
        policies=described(plan, item.variables),
        covered=resolved.covered,
        recomputed=recomputed,
    )


def _run_writes(rewrite: Rewrite) -> RunWrites:
    """Return what runs write; what a user's pass makes of it, only the user knows."""
    if rewrite.plan.passes:
        return RunWrites()
    original, homes = rewrite.get(Recorded), rewrite.homes.of
    on_chief = [rewrite.item.variables[name].handle for name in homes if rewrite.request.task]
    elsewhere = {original_name(handle, original.nodes) for handle in on_chief}
    return compared(original.writes, original.nodes, rewrite.graph, elsewhere)


def _layout(rewrite: Rewrite) -> Layout:
    plan, rewrite, state = rewrite.plan, rewrite, rewrite.get(Propagation)
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
    )


# How many bytes of variables each device holds.


def held_bytes(graph: Graph, variables: Mapping[str, Variable], devices: Sequence[str]) -> dict[str, int]:
    """Return the bytes of variables by device, all copies and shards counted; unknown dimensions count as 1.

    Args:
        graph: the folded graph, placed.
        variables: those that the graph has.
        devices: one per replica.
    """
    found = dict.fromkeys(devices, 0)
    for variable in variables.values():
        node = graph.nodes.get(variable.handle)
        if node is None:
            continue
        for device in devices if node.span != ONCE else (node.device,):
            found[device] = found.get(device, 0) + variable.nbytes
    return found
