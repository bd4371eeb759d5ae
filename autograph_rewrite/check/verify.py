"""Train the original and the rewritten graph side by side, and compare every variable and output.

item ─┬─ original ──► session ─┐   same initial values, same feeds, same seeds
      └─ rewritten ─► session ─┴─► error of each variable (all copies), slot and output after every step
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.check.compression import KIND as COMPRESSED
from autograph_rewrite.check.compression import compressed_rows, with_compressed, without
from autograph_rewrite.check.random_feeds import batch_size, random_feeds
from autograph_rewrite.check.report import VerifyReport, rows_of
from autograph_rewrite.check.side_by_side import Comparison, Tolerance, Training, TrialSettings
from autograph_rewrite.compile import Instrumentation, compile_task, request, with_processes
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ir.types.replica_marks import COUNT, ID, replica_mark
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ir.verify.collective_groups import collect
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.ir.verify.ranks import check_ranks
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.traits import READS, has
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import coverage
from autograph_rewrite.runtime.function.session_step import unbind
from autograph_rewrite.training_graph import TrainingGraph


def verify(item: TrainingGraph, config_or_plan: ConfigLike | Plan, trial: TrialSettings) -> VerifyReport:
    """Rewrite an item, train it and the original on the same feeds from the same values, and compare.

    Captured variables are copied, so the user's variables do not change. For several processes, the graphs of all of
    them are first checked to fit together, without running; then a graph with all replicas in this process is trained.

    The coverage is computed for the batch of the trial, too; where it has none, for the one that `rewrite` assumes.

    Returns:
        The report; a mismatch is `ok == False`, no exception.

    Raises:
        RewriteError: the item cannot be rewritten, as for `rewrite`.
        VerifyError: the rewritten graph breaks an invariant; nothing was run.
        GraphError: the original itself cannot be trained on these feeds.
        ClusterError: a step hangs.
    """
    began = time.perf_counter()
    ready = prepare(item, config_or_plan, trial)
    flat, given, asked, plan = ready.flat, ready.given, ready.asked, ready.plan
    fitting = _fitting(flat, asked)
    certificate, exact = Certificate(), without(plan)
    looking = Instrumentation(certificate=certificate)
    rewritten = checked(flat, exact, looking, trial.batch)
    covered = replace(rewritten.report.covered, place=given.where("semantics", "min_coverage"))
    coverage.require(covered)
    compressed = checked(flat, plan, looking, trial.batch) if exact is not plan else None
    size = batch_size(flat, plan.instances, trial.batch) if trial.feeds is None else None
    training, allowed = ready.training(trial), trial.allowed
    report = compare(ready.original, rewritten, training, allowed, incomparable(flat, rewritten))
    if compressed is not None:
        report = with_compressed(report, compressed_rows(compressed, training, allowed), plan)
    uncertain = [f"not covered by the certificate: {what}" for what in certificate.not_covered]
    notes = (*fitting, *_semantics_notes(plan), *ready.notes, *uncertain, *report.notes)
    report = replace(report, config=_described(asked), batch=size, notes=notes, covered=covered)
    report = replace(report, advice=_advice(report, plan, rewritten.report.inexact))
    return replace(report, seconds=time.perf_counter() - began)


def _advice(report: VerifyReport, plan: Plan, inexact: Sequence[Note]) -> tuple[str, ...]:
    """Return what to try where values differ, the likely cause first."""
    if report.ok:
        return ()
    sent = {row.name for row in report.wrong if row.kind == COMPRESSED}
    found = [f"{note.op} '{note.node}' is not exact, as the configuration asks: {note.text}" for note in inexact]
    if sent:
        names = sorted({edge.compressor for edge in plan.edges if edge.compressor != "none"})
        found.append(f"`compressor: none` shows whether {', '.join(names) or 'the compressor'} is what differs")
    if len(sent) < len(report.wrong):
        found.append("ar.bisect(item, config): the first pass, value and edge that are wrong")
        found.append("ar.reduce(item, config): a graph of a few nodes that still fails, to report")
    return tuple(found)


def _fitting(flat: TrainingGraph, plan: Plan) -> list[str]:
    """Check that the graphs of several processes fit together; return notes on how the job was compared."""
    told = [fit_together(flat, plan)] if len(plan.processes) > 1 else []
    if plan.steps_per_run > 1:
        told.append(f"single steps were compared, of which a run does {plan.steps_per_run} in a loop")
    return told + ([f"the stages of {plan.workers} processes were run in one"] if plan.is_driven else [])


def checked(flat: TrainingGraph, plan: Plan, looking: Instrumentation, batch: int | None = None) -> TrainingGraph:
    """Rewrite a normalised item, checking the graph after every pass and the result.

    Raises:
        VerifyError: the rewritten graph breaks an invariant.
    """
    rewritten = compile_task(flat, plan, batch=batch, instrumentation=looking)
    check_expanded(rewritten.graph_bytes, flat, plan.all_devices, micro=plan.microbatches)
    return rewritten


def compare(
    original: TrainingGraph,
    rewritten: TrainingGraph,
    training: Training,
    allowed: Tolerance,
    apart: Collection[str] = frozenset(),
) -> VerifyReport:
    """Train two items side by side, and compare them as `verify` does.

    Args:
        original: an item without captures.
        apart: keys that are not compared (`incomparable`).
    """
    began = time.perf_counter()
    plan: Plan = rewritten.report.plan
    comparison = Comparison(original, training, allowed, plan.timeout_seconds)
    worst = {key: one for key, one in comparison.against(rewritten).items() if key not in apart}
    over = any(found.error > allowed.rtol for found in worst.values())
    rows = rows_of(original.variables, worst, allowed.rtol, comparison.noise() if over else {}, comparison.broken)
    return VerifyReport(
        ok=all(row.ok for row in rows) and not comparison.is_meaningless,
        max_error=max((row.error for row in rows), default=0.0),
        rows=rows,
        config=_described(plan),
        steps=training.steps,
        batch=None,
        rtol=allowed.rtol,
        notes=(*said(apart), *comparison.notes(rows)),
        seconds=time.perf_counter() - began,
    )


def _semantics_notes(plan: Plan) -> list[str]:
    """Return a note for each setting of the plan that changes results from those of one device."""
    notes = []
    if plan.semantics.random == "independent":
        notes.append("semantics.random is independent: replicas draw their own numbers, so results differ by design")
    if plan.local_sgd is not None:
        notes.append("local_sgd lets each replica train by itself, so variables differ from one device's by design")
    if plan.semantics.batch_norm == "local":
        notes.append("semantics.batch_norm is local: replicas have their own statistics, so results differ by design")
    return notes


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "strategy": plan.strategy or "plan",
        "mode": plan.mode,
        "devices": list(plan.devices),
        "batch_norm": plan.semantics.batch_norm,
        "random": plan.semantics.random,
    }


# Values that cannot be compared with one device: those that depend on a replica's number or its component.
#
# id ──► noise ──► loss ──► gradient ──► w        loss and w are not those of one device, and need not be

SHOWN = 5


def incomparable(item: TrainingGraph, rewritten: TrainingGraph) -> frozenset[str]:
    """Return the keys ("variable NAME", "output NAME") of values that differ from one device by design.

    Args:
        item: normalised.
        rewritten: its rewrite; the report names the variables whose updates are merged from those of the replicas.
    """
    graph = item.graph
    handles = {graph.nodes[v.handle]: name for name, v in item.variables.items() if v.handle in graph.nodes}
    reached: set[Node] = set()
    pending = [node for node in graph if replica_mark(node.name) in (ID, COUNT)]
    variables = {note.node for note in rewritten.report.inexact if note.node in item.variables}
    pending += [read for handle, name in handles.items() if name in variables for read in _reads(handle)]
    while pending:
        reached |= descendants(pending, controls=False) | set(pending)
        written = {handle_node(value) for node in reached if is_update(node) for value in node.inputs[:1]}
        new = {handles[handle] for handle in written if handle in handles} - variables
        variables |= new
        pending = [read for handle, name in handles.items() if name in new for read in _reads(handle)]
    outputs = {name for name, info in item.outputs.items() if graph.value(info.tensor).node in reached}
    return frozenset({*(f"variable {name}" for name in variables), *(f"output {name}" for name in outputs)})


def _reads(handle: Node) -> list[Node]:
    return [use.node for use in handle_uses(handle) if use.node.op in READS]


def said(apart: Collection[str]) -> list[str]:
    """Return the note that lists values that were not compared."""
    if not apart:
        return []
    why = "they depend on the number of a replica, or on what replicas have alone (variable_policies)"
    return [f"not compared with one device, from which they differ by design: {few(sorted(apart), SHOWN)}; {why}"]


# `ar.verify` for several processes: their graphs are verified together, and their numerics in this process.
#
#     plan of 2 processes ──► graphs of rank 0, rank 1 ──► check_ranks            nothing is run
#                         └─► the same replicas in one process ──► comparison     as for any other plan
#
# Wrong numbers that only the exchange between processes could cause are not found: train on the cluster for that.


def fit_together(item: TrainingGraph, plan: Plan) -> str:
    """Rewrite an item for every process, and check that the graphs fit together; return a sentence that says so.

    Args:
        item: a normalised item; it is not changed.
        plan: of several processes.

    Raises:
        VerifyError: the graphs do not fit; it names every broken invariant, with its rank.
    """
    count = len(plan.processes)
    graphs = []
    for task in range(count):
        graph = serde.from_bytes(compile_task(item, plan, task).graph_bytes)
        if task == 0 or not plan.homes:  # only worker 0 updates the variables on servers
            check_expanded(graph, item, plan.all_devices, count)
        graphs.append(graph)
    check_ranks(graphs, item, plan.homes.values())
    meeting, _ = collect(node for graph in graphs for node in graph)
    members = sum(len(group.members) for group in meeting)
    return (
        f"the graphs of {count} processes fit together ({len(meeting)} collectives with {members} members); "
        f"numbers were compared for their {plan.replicas} replicas in one process"
    )


def in_one_process(plan: Plan) -> Plan:
    """Return the request of a plan with all its replicas in this process; return a plan of one process unchanged."""
    if not plan.is_driven and len(plan.processes) <= 1:
        return plan
    if plan.is_driven or plan.model is not None:
        return _with_parts(plan, tuple(f"/device:CPU:{i}" for i, _ in enumerate(plan.part_devices)))
    devices = tuple(f"/device:CPU:{replica}" for replica in range(plan.replicas))
    known = {device: here for device, here in zip(plan.devices, devices, strict=True)}
    for one in plan.variables:
        for server in one.servers:
            known.setdefault(server, devices[len(known) % len(devices)])
    variables = tuple(
        replace(
            request,
            servers=tuple(known[server] for server in request.servers),
            server=replace(request.server, sync=True, staleness=0) if request.server is not None else None,
        )
        for request in plan.variables
    )
    return replace(plan, devices=devices, variables=variables, edges=(), graph_digest="")


def _with_parts(plan: Plan, devices: tuple[str, ...]) -> Plan:
    """Return the request with the stages and logical devices of its replicas on other devices."""
    model, pipeline = plan.model, plan.pipeline
    each = model.size if model is not None else 1
    if model is not None:
        model = replace(model, devices=devices)
    if pipeline is not None:
        pipeline = replace(pipeline, devices=devices[::each])
    first = devices[:: len(devices) // plan.replicas]
    return replace(plan, devices=first, pipeline=pipeline, model=model, edges=(), graph_digest="")


# Prepare a comparison: an original without captures, its normal form with the same seeds, and the plan for one process.
#
# item ──unbind──► original ──normalise──► flat ──request──► plan, all of its replicas in this process


@dataclass(frozen=True)
class Prepared:
    """A comparison before anything is rewritten.

    Attributes:
        original: the item without captures, every random op seeded.
        flat: its normal form, with the same seeds.
        values: of captured variables, by name.
        given: the configuration, with its processes, or the plan.
        asked: the plan of the whole job.
        plan: the same plan with all replicas in this process, and one step in a run.
        notes: notes on the seeds.
    """

    original: TrainingGraph
    flat: TrainingGraph
    values: Mapping[str, Any]
    given: Config | Plan
    asked: Plan
    plan: Plan
    notes: tuple[str, ...]

    def training(self, trial: TrialSettings) -> Training:
        """Return the training of a trial, with random feeds if it has none."""
        feeds, seed = trial.feeds, trial.seed
        if feeds is None:
            size = batch_size(self.flat, self.plan.instances, trial.batch)
            feeds = random_feeds(self.flat, steps=trial.steps, batch=size, seed=seed)
        return Training(feeds, trial.steps, self.values, seed)


def prepare(item: TrainingGraph, config_or_plan: ConfigLike | Plan, trial: TrialSettings) -> Prepared:
    """Return the original, its normal form and the plan of a comparison.

    Args:
        item: a training graph; it is not changed.

    Raises:
        GraphError: the trial has no steps.
        RewriteError: there is no plan for it.
    """
    if trial.steps < 1:
        raise GraphError(f"there is nothing to compare after {trial.steps} steps", hint="steps has to be at least 1")
    single, values = unbind(item)
    flat = normalise_original(single)
    given = config_or_plan if isinstance(config_or_plan, Plan) else with_processes(Config.of(config_or_plan))
    asked = request(flat, given)
    plan = replace(in_one_process(asked), steps_per_run=0)
    original, notes = _with_seeds(single, flat, trial.seed)
    return Prepared(original, flat, values, given, asked, plan, tuple(notes))


def _with_seeds(single: TrainingGraph, flat: TrainingGraph, seed: int) -> tuple[TrainingGraph, list[str]]:
    """Seed the random ops of `flat`, in place; return the original with the same seeds, and notes."""
    hidden = set(unseeded(flat.graph)) - set(unseeded(single.graph))
    pinned = pin(flat.graph, seed)
    notes = []
    if pinned:
        ops = "1 random op without a seed was" if len(pinned) == 1 else f"{len(pinned)} random ops without a seed were"
        notes.append(f"{ops} given one in both graphs ('{pinned[0]}')")
    if hidden:
        notes.append("random ops stand in functions, so the original was run with its functions inlined")
        return flat, notes
    graph = single.graph.clone()
    pin(graph, seed)
    return replace(single, source=graph), notes


# Give every unseeded random op a different seed, so that two runs of one graph draw the same numbers.
#
# An op with `seed = seed2 = 0` draws a new seed in every process. Datasets take their seeds as inputs.


_MAX_SEED = 2**31 - 1


def unseeded(graph: Graph) -> tuple[str, ...]:
    """Return the names of the random ops that draw other numbers in every run; ops inside functions are not found."""
    return tuple(node.name for node in graph if _attrs_are_zero(node) or _inputs_are_zero(node))


def pin(graph: Graph, seed: int) -> tuple[str, ...]:
    """Seed the unseeded random ops of a graph in place; return their names."""
    names = unseeded(graph)
    for name in names:
        node = graph.node(name)
        # Both seeds are above zero, because two zeros mean no seed; they depend only on `seed` and the op's name.
        first, second = (zlib.crc32(f"{seed}/{part}/{name}".encode()) % _MAX_SEED + 1 for part in (1, 2))
        if _attrs_are_zero(node):
            node.set_attr("seed", first)
            node.set_attr("seed2", second)
        else:
            for index, value in zip(_seed_inputs(node), (first, second), strict=True):
                build = Builder(graph, f"{name}/seed", device=node.device)
                node.set_input(index, build.const(value, dtypes.INT64))
    return names


def _attrs_are_zero(node: Node) -> bool:
    op = find_op(node.op)
    if op is None or not {"seed", "seed2"} <= op.attrs.keys():
        return False
    return not node.attr("seed") and not node.attr("seed2")


def _seed_inputs(node: Node) -> tuple[int, ...]:
    """Return the positions of the inputs `seed` and `seed2`, of ops whose inputs are single tensors."""
    op = find_op(node.op)
    if op is None or any(arg.number_attr or arg.type_list_attr for arg in op.inputs):
        return ()
    return tuple(i for i, arg in enumerate(op.inputs) if arg.name in ("seed", "seed2"))


def _inputs_are_zero(node: Node) -> bool:
    positions = _seed_inputs(node)
    if len(positions) != 2:
        return False
    producers = [node.inputs[index].node for index in positions]
    return all(has(producer.op, "constant") and _is_zero(producer) for producer in producers)


def _is_zero(const: Node) -> bool:
    value = const.attr("value")
    return isinstance(value, np.ndarray) and value.size == 1 and not value.any()
