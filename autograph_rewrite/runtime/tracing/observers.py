"""Who is told of the steps of a function or session, as the environment asks.

They are what stops between two steps, a profile, and how far the process has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from autograph_rewrite.runtime.preemption import step_boundary
from autograph_rewrite.runtime.progress import report
from autograph_rewrite.runtime.tracing import requested
from autograph_rewrite.runtime.tracing.tracer import StepObserver
from autograph_rewrite.training_graph import RewrittenTrace


@dataclass(frozen=True)
class _All:
    """Tells several."""

    observers: Sequence[StepObserver]

    @contextmanager
    def step(self, trace: RewrittenTrace, examples: int | None) -> Iterator[None]:
        """Run one step."""
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.step(trace, examples))
            yield


def observers() -> StepObserver | None:
    """Return who is to be told of steps; None: nobody."""
    asked = (step_boundary.requested(), requested.requested(), report.requested())
    found: list[StepObserver] = [one for one in asked if one is not None]
    return found[0] if len(found) == 1 else _All(found) if found else None
