"""Put a report together: from an original and its rewrite, or from whichever of them is at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.levers import levers
from autograph_rewrite.cost.simulate import SimulatedStep, simulate
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.profile.profile import Profile
from autograph_rewrite.inspect.profile.report_part import report_part
from autograph_rewrite.inspect.report import overview, tables
from autograph_rewrite.inspect.report.cost import of_cost
from autograph_rewrite.inspect.report.graph_states import GraphStates
from autograph_rewrite.inspect.report.html_file import page
from autograph_rewrite.inspect.report_view import account_of
from autograph_rewrite.inspect.summary import summarise
from autograph_rewrite.ir.graph import PASS_ATTR, Graph
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph

SCHEMA = 1
NO_SNAPSHOTS = "There are no snapshots of the passes: give the original graph and --config, and they run again."
NO_ORIGINAL = "There is no original to simulate: give the original graph and --config."
NO_PLAN = "A .pb keeps no plan: with --plan, owners, bytes and reasons are shown as well."


@dataclass(frozen=True)
class Shown:
    """What a report is about.

    Attributes:
        states: of the graph, the last as the file has it.
        original: the graph before it was rewritten, where that is at hand.
        new: the rewritten one, if there is one.
        plan: of the rewrite, where that is known.
        config: how it was rewritten, for the speed of the network, and for other plans.
        batch: examples of all devices together, where the graph leaves that open.
        measured: some steps of it.
        verified: what `verify` found, as plain data; None: it was not run.
    """

    states: GraphStates
    original: TrainingGraph | None = None
    new: TrainingGraph | None = None
    plan: Plan | None = None
    config: Config | None = None
    batch: int | None = None
    measured: Profile | None = None
    verified: Mapping[str, Any] | None = None


def of_ranks(
    states: GraphStates,
    original: TrainingGraph,
    run: Callable[[TrainingGraph, list[Observer], int], TrainingGraph],
    task: int | None,
) -> TrainingGraph:
    """Keep the graph behind every pass, and of several processes that of each; return the first that is shown.

    Args:
        states: what keeps them.
        original: the graph that is rewritten.
        run: rewrites a graph, with observers, for one process.
        task: the one process that is shown; None: all of them.
    """
    states.keep("original", original.graph, original.placements)
    flat = normalise_original(original)
    states.keep("normalise", flat.graph)
    new = run(flat, [states], task or 0)
    plan = new.report.plan
    several = task is None and len(plan.processes) > 1 and not plan.stage_hosts
    states.keep("expand (rank 0)" if several else "expand", new.graph, new.placements)
    for rank in range(1, len(plan.processes) if several else 1):
        other = run(flat, [], rank)
        states.keep(f"expand (rank {rank})", other.graph, other.placements)
    return new


def is_rewritten(graph: Graph) -> bool:
    """Return whether passes have made nodes of a graph."""
    return any(PASS_ATTR in node.attrs for node in graph)


def report_data(shown: Shown) -> dict[str, Any]:
    """Return what the page shows, as plain data by view; docs/report.md has the schema."""
    item, new, plan = shown.original or shown.new, shown.new, shown.plan
    assert item is not None
    found = summarise(item)
    told = new is not None and new.report is not None
    notes = [NO_SNAPSHOTS] if new is not None and len(shown.states.steps) == 1 else []
    notes += [NO_PLAN] if new is not None and plan is None else []
    simulated, problem = _step(shown)
    step = overview.of_step(simulated.found) if simulated is not None else None
    states = shown.states.data()  # numbers the names that the cost refers to
    return {
        "overview": {
            "schema": SCHEMA,
            "graph": overview.of_graph(found),
            "rewrite": overview.of_rewrite(account_of(new, shown.batch)) if told and new is not None else None,
            "batch": plan.batch if plan is not None else 0,
            "notes": [*notes, problem] if problem else notes,
            "no_step": problem,
        },
        "graph": states,
        **{f"step-{index}": one.data() for index, one in enumerate(shown.states.steps)},
        "variables": tables.variables(found.variables, plan),
        "exchanges": tables.exchanges(new, plan) if new is not None else [],
        "reshards": tables.reshards(new, plan) if new is not None and plan is not None else [],
        "model_edges": tables.model_edges(plan) if new is not None and plan is not None else [],
        "step": step,
        "cost": _cost(shown, simulated) if simulated is not None else None,
        "verified": shown.verified,
        "measured": _measured(shown, step),
    }


def _step(shown: Shown) -> tuple[SimulatedStep | None, str]:
    """Return the simulated step, or why there is none."""
    if shown.new is None:
        return None, ""
    if shown.original is None or shown.plan is None:
        return None, NO_ORIGINAL
    batch = shown.batch or (shown.measured.examples if shown.measured is not None else 0)
    try:
        found = simulate(shown.original, shown.plan, shown.config, batch=batch or None)
    except RewriteError as error:
        return None, f"The step cannot be simulated: {error}"
    return found, ""


def _cost(shown: Shown, step: SimulatedStep) -> dict[str, Any]:
    return of_cost(step.found, shown.states.names, levers(step, shown.config), shown.measured)


def _measured(shown: Shown, step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the measured step, beside its own prediction or else this report's; None where there is none."""
    if shown.measured is None:
        return None
    return report_part(replace(shown.measured, predicted=shown.measured.predicted or step))


def report_page(title: str, shown: Shown) -> str:
    """Return the page that shows it."""
    return page(f"{title} - autograph-rewrite", report_data(shown))
