"""verify: train the original and the rewritten graph side by side, and compare every variable and output.

item ─┬─ original ──► session ─┐   same initial values, same feeds, same seeds
      └─ rewritten ─► session ─┴─► error of each variable (all copies), slot and output after every step
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.compile import Instrumentation, compile_task
from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import coverage
from autograph_rewrite.runtime.verify.cluster import fit_together
from autograph_rewrite.runtime.verify.compression import KIND as COMPRESSED
from autograph_rewrite.runtime.verify.compression import compressed_rows, with_compressed, without
from autograph_rewrite.runtime.verify.incomparable import incomparable, said, unless
from autograph_rewrite.runtime.verify.prepare import prepare
from autograph_rewrite.runtime.verify.random_feeds import batch_size, random_feeds
from autograph_rewrite.runtime.verify.report import VerifyReport, rows_of
from autograph_rewrite.runtime.verify.side_by_side import Comparison, Feeds, Tolerance, Training
from autograph_rewrite.training_graph import TrainingGraph


def verify(
    item: TrainingGraph,
    config_or_plan: ConfigLike | Plan,
    *,
    steps: int = 3,
    feeds: Feeds | None = None,
    rtol: float = 1e-5,
    atol: float | None = None,
    seed: int = 0,
    batch: int | None = None,
) -> VerifyReport:
    """Rewrite an item, train it and the original on the same feeds from the same values, and compare.

    Captured variables are copied: those of the user do not change. For several processes the graphs of all of them are
    first shown to fit together, without being run; what is trained then has all replicas in this process.

    Args:
        steps: how many to train.
        feeds: one dict of values by input name per step (used in turn), or one for all; None makes random ones.
        rtol: allowed error, relative to the largest value of each tensor.
        atol: allowed error of tensors that are all but zero; by default `rtol` times 0.01, for float64 times 1e-6.
        seed: of random feeds, and of random ops that have none.
        batch: examples per step of random feeds; by default an odd prime, so that replicas get uneven parts. The
            coverage is that of this batch, by default of a usual one.

    Returns:
        The report; a mismatch is `ok == False`, no exception.

    Raises:
        RewriteError: the item cannot be rewritten, as for `rewrite`.
        VerifyError: the rewritten graph breaks an invariant; nothing was run.
        GraphError: the original itself cannot be trained on these feeds.
        ClusterError: a step hangs.
    """
    began = time.perf_counter()
    if steps < 1:
        raise GraphError(f"there is nothing to compare after {steps} steps", hint="steps has to be at least 1")
    ready = prepare(item, config_or_plan, seed)
    flat, given, asked, plan = ready.flat, ready.given, ready.asked, ready.plan
    fitting = _fitting(flat, asked)
    certificate, exact = Certificate(), without(plan)
    rewritten = _checked(flat, exact, certificate, batch)
    covered = replace(rewritten.report.covered, place=given.where("semantics", "min_coverage"))
    coverage.require(covered)
    compressed = _checked(flat, plan, certificate, batch) if exact is not plan else None
    size = None
    if feeds is None:
        feeds = random_feeds(flat, steps=steps, batch=(size := batch_size(flat, plan.instances, batch)), seed=seed)
    training, allowed = Training(feeds, steps, ready.values, seed), Tolerance(rtol, atol)
    report = compare(ready.original, rewritten, training, allowed, incomparable(flat, rewritten))
    if compressed is not None:
        report = with_compressed(report, compressed_rows(compressed, training, allowed), plan)
    notes = (*fitting, *_semantics_notes(plan), *ready.notes, *_uncertain(certificate), *report.notes)
    report = replace(report, config=_described(asked), batch=size, notes=notes, covered=covered)
    report = replace(report, advice=_advice(report, plan, rewritten.report.inexact))
    return replace(report, seconds=time.perf_counter() - began)


def _advice(report: VerifyReport, plan: Plan, inexact: Sequence[Note]) -> tuple[str, ...]:
    """Say what to try where something differs, the likely cause first."""
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


def _uncertain(certificate: Certificate) -> list[str]:
    return [f"not covered by the certificate: {what}" for what in certificate.not_covered]


def _fitting(flat: TrainingGraph, plan: Plan) -> list[str]:
    """Show that the graphs of several processes fit together; return what there is to say of it."""
    told = [fit_together(flat, plan)] if len(plan.processes) > 1 else []
    if plan.steps_per_run > 1:
        told.append(f"single steps were compared, of which a run does {plan.steps_per_run} in a loop")
    return told + ([f"the stages of {plan.workers} processes were run in one"] if plan.is_driven else [])


def _checked(flat: TrainingGraph, plan: Plan, certificate: Certificate, batch: int | None) -> TrainingGraph:
    """Return the rewrite of a normalised item, whose every pass and result has been checked."""
    looking = Instrumentation(certificate=certificate)
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
    """Train two items side by side; see `verify`.

    Args:
        original: an item without captures.
        rewritten: what `rewrite` made of it.
        training: what both are trained on.
        allowed: which error is none.
        apart: what is not compared (`incomparable`).
    """
    began = time.perf_counter()
    plan: Plan = rewritten.report.plan
    comparison = Comparison(original, training, allowed, plan.timeout_seconds)
    worst = unless(comparison.against(rewritten), apart)
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
    """Say what the plan wants to be different from one device."""
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
