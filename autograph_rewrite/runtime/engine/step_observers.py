"""Report the steps of functions and sessions to observers: stops, profiles and progress files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from autograph_rewrite.runtime.job import progress, stop
from autograph_rewrite.training_graph import RewrittenTrace

PROFILE = "AUTOGRAPH_REWRITE_PROFILE"
"""The environment variable that asks for a profile."""


class StepObserver(Protocol):
    """Observes the steps of a distributed function or session."""

    def step(self, trace: RewrittenTrace, examples: int | None) -> AbstractContextManager[None]:
        """Return a context in which one step runs.

        Args:
            trace: the graph that runs, and its original where that is known.
            examples: in this process's part of the batch; None: unknown.
        """


@dataclass(frozen=True)
class _All:
    """Reports to several observers."""

    observers: Sequence[StepObserver]

    @contextmanager
    def step(self, trace: RewrittenTrace, examples: int | None) -> Iterator[None]:
        """Run one step."""
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.step(trace, examples))
            yield


def observers() -> StepObserver | None:
    """Return the observer of the steps of one function or session; None: no observer."""
    asked: list[StepObserver | None] = [stop.requested(), progress.requested()]
    if PROFILE in os.environ:
        from autograph_rewrite.runtime.engine.tracing import RequestedProfile  # imports cost model and reports

        asked.insert(1, RequestedProfile(PROFILE))
    found: list[StepObserver] = [one for one in asked if one is not None]
    return found[0] if len(found) == 1 else _All(found) if found else None
