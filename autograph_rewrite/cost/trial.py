"""Dry-run a plan on a copy of the graph, so that no plan is offered that a rewrite would reject.

A simulation knows what a step takes, not whether every edge of it can be lowered.
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.compile import compile_task, request
from autograph_rewrite.cost.search import Candidate
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


def refusal(item: TrainingGraph, plan: Plan) -> RewriteError | None:
    """Return why a plan cannot be carried out, None where it can.

    Args:
        item: normalised; it is not changed.
        plan: a request, or a plan with edges.
    """
    training = bool(item.targets)  # micro-batches and stages are tried with the rest, where anything is trained
    tried = plan if training else plan.without_stages()
    try:
        request(item, plan)
        for task in sorted({0, plan.workers - 1}):  # what worker 0 does for all, and what the others do
            compile_task(item, tried, task, training=training)
    except RewriteError as error:
        return error
    return None


def first_possible(item: TrainingGraph, candidates: Iterable[Candidate]) -> tuple[Candidate, list[str]]:
    """Return the first candidate that can be carried out, and for each before it why it cannot.

    Args:
        item: normalised.
        candidates: at least one, the best first.

    Raises:
        RewriteError: that of the first, if none of them can.
    """
    notes: list[str] = []
    first: RewriteError | None = None
    for candidate in candidates:
        error = refusal(item, candidate.plan)
        if error is None:
            return candidate, notes
        first = first or error
        notes.append(f"a plan like {candidate.plan.strategy} was dropped, since it cannot be built: {error.problem}")
    assert first is not None
    raise first
