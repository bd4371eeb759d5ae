"""verify: train the original and the rewritten graph side by side, and compare every variable and output.

item ─┬─ original ──► session ─┐   same initial values, same feeds, same seeds
      └─ rewritten ─► session ─┴─► error of each variable (all copies), slot and output after every step
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.verify_expanded import check_expanded
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.normal import normalise_original
from autograph_rewrite.passes import coverage, pipeline
from autograph_rewrite.plan import check as plan_check
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.check_cluster import fit_together, in_one_process
from autograph_rewrite.runtime.check_compressed import compressed_rows, with_compressed, without
from autograph_rewrite.runtime.check_report import VerifyReport, rows_of
from autograph_rewrite.runtime.comparison import Comparison, Feeds
from autograph_rewrite.runtime.pin_seeds import pin, unseeded
from autograph_rewrite.runtime.random_feeds import batch_size, random_feeds
from autograph_rewrite.runtime.unbind import unbind


def verify(
    item: GraphItem,
    config_or_plan: Config | Plan | Mapping[str, Any] | str | Path,
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
        item: a training graph.
        config_or_plan: as for `rewrite`.
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
    single, values = unbind(item)
    flat = normalise_original(single)
    asked = _plan(flat, config_or_plan)
    fitting = [fit_together(flat, asked)] if len(asked.processes) > 1 else []
    fitting += [f"the stages of {asked.workers} processes were run in one"] if asked.stage_hosts else []
    plan = in_one_process(asked)
    original, seeded = _with_seeds(single, flat, seed)

    certificate = Certificate()

    def rewrite(with_plan: Plan) -> GraphItem:
        rewritten = pipeline.rewrite(flat, with_plan, verify=True, certificate=certificate, batch=batch)
        check_expanded(rewritten.graph_bytes, flat, plan.all_devices, micro=plan.microbatches)
        return rewritten

    exact = without(plan)
    rewritten = rewrite(exact)
    covered = replace(rewritten.report.covered, place=_place(config_or_plan))
    coverage.require(covered)
    compressed = rewrite(plan) if exact is not plan else None
    size = None
    if feeds is None:
        size = batch_size(flat, plan.instances, batch)
        feeds = random_feeds(flat, steps=steps, batch=size, seed=seed)
    report = compare(original, rewritten, feeds=feeds, steps=steps, rtol=rtol, atol=atol, seed=seed, values=values)
    if compressed is not None:
        rows = compressed_rows(compressed, feeds, steps=steps, rtol=rtol, atol=atol, values=values, seed=seed)
        report = with_compressed(report, rows, plan)
    uncertain = [f"not covered by the certificate: {what}" for what in certificate.not_covered]
    notes = (*fitting, *_semantics_notes(plan), *seeded, *uncertain, *report.notes)
    report = replace(report, config=_described(asked), batch=size, notes=notes, seconds=time.perf_counter() - began)
    return replace(report, covered=covered)


def compare(
    original: GraphItem,
    rewritten: GraphItem,
    *,
    feeds: Feeds,
    steps: int = 3,
    rtol: float = 1e-5,
    atol: float | None = None,
    seed: int = 0,
    values: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Train two items side by side; see `verify`.

    Args:
        original: an item without captures.
        rewritten: what `rewrite` made of it.
        feeds: as for `verify`, but not None.
        steps: how many to train.
        rtol: allowed relative error.
        atol: allowed error of tensors that are all but zero.
        seed: of initial values that nothing gives.
        values: initial values by variable; of the others, the initialisers give them.
    """
    began = time.perf_counter()
    plan: Plan = rewritten.report.plan
    comparison = Comparison(
        original, feeds, steps=steps, rtol=rtol, atol=atol, timeout=plan.timeout_seconds, values=values or {}, seed=seed
    )
    worst = comparison.against(rewritten)
    over = any(found.error > rtol for found in worst.values())
    rows = rows_of(original.variables, worst, rtol, comparison.noise() if over else {}, comparison.broken)
    return VerifyReport(
        ok=all(row.ok for row in rows) and not comparison.is_meaningless,
        max_error=max((row.error for row in rows), default=0.0),
        rows=rows,
        config=_described(plan),
        steps=steps,
        batch=None,
        rtol=rtol,
        notes=tuple(comparison.notes(rows)),
        seconds=time.perf_counter() - began,
    )


def _place(config: Config | Plan | Mapping[str, Any] | str | Path) -> str:
    """Return where the smallest coverage is said."""
    said = config if isinstance(config, Plan) else Config.of(config)
    return said.where("semantics", "min_coverage")


def _plan(item: GraphItem, config: Config | Plan | Mapping[str, Any] | str | Path) -> Plan:
    from autograph_rewrite.strategies import builder_for

    if isinstance(config, Plan):
        plan_check.require(replace(config, edges=()), item)  # its edges are checked once the graph is analysed
        return config
    config = Config.of(config)
    if config.devices is None and config.cluster is None:
        config = config.with_devices([device.name for device in tensorflow().config.list_logical_devices()])
    plan = builder_for(config).build(item, config)
    plan_check.require(plan, item)
    return plan


def _with_seeds(single: GraphItem, flat: GraphItem, seed: int) -> tuple[GraphItem, list[str]]:
    """Seed the random ops of `flat`, in place; return the original with the same seeds, and what to say about it."""
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
    return single.with_(graph=graph), notes


def _semantics_notes(plan: Plan) -> list[str]:
    """Say what the plan wants to be different from one device."""
    notes = []
    if plan.semantics.random == "independent":
        notes.append("semantics.random is independent: replicas draw their own numbers, so results differ by design")
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
