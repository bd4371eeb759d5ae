"""The boundary before each step of a function or session, where its process stops if it is asked to."""

from __future__ import annotations

from contextlib import AbstractContextManager

from autograph_rewrite.runtime.preemption.stop import Stop, is_wanted
from autograph_rewrite.training_graph import RewrittenTrace


class StepBoundary:
    """Observes the steps of one function or session.

    Args:
        stop: whether this process stops.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def step(self, trace: RewrittenTrace, _: int | None) -> AbstractContextManager[None]:
        """Return a context in which one step runs, unless the process stops before it."""
        return self._stop.step(self, trace.rewritten.report)


def requested() -> StepBoundary | None:
    """Return the boundary of a function or session; None where its process ends as Python does."""
    return StepBoundary(Stop.here()) if is_wanted() else None
