"""The predicted step of what was measured, for the same number of examples."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.cost.simulate import simulate
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.report.overview import of_step
from autograph_rewrite.training_graph import RewrittenTrace


def prediction(
    trace: RewrittenTrace | None, examples: int, machine: Machine | None = None
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the simulated step as plain data, and what there is to say about it.

    Args:
        trace: what ran, and what it was made of.
        examples: of all ranks; 0: what the graph says.
        machine: how fast its devices are; None: round figures.
    """
    if trace is None or trace.rewritten.report is None:
        return None, ()
    if trace.original is trace.rewritten:
        return None, ("the original graph is not at hand, so nothing is predicted",)
    if trace.rewritten.report.plan.steps_per_run > 1:
        return None, ("each run does several steps (steps_per_run): `simulate` predicts one of them",)
    try:
        found = simulate(trace.original, trace.rewritten.report.plan, batch=examples or None, machine=machine).found
    except RewriteError as error:
        return None, (f"the step cannot be simulated: {error}",)
    notes = () if machine is not None else ("the prediction takes round figures for this machine: calibrate it",)
    return of_step(found), notes
