"""Report the steps of functions and sessions to observers: stops, profiles and progress files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from autograph_rewrite.runtime.job import progress, stop
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph

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


def observed(
    observer: StepObserver | None, item: TrainingGraph, feeds: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Return a context in which a session runs one step."""
    if observer is None:
        return nullcontext()
    sizes = []
    for one in item.inputs.values():
        if one.tensor in feeds and one.batch_axis is not None:
            shape = np.shape(feeds[one.tensor])
            several = one.shape is not None and len(shape) > len(one.shape)  # a row for each of several steps
            sizes.append(shape[0] * shape[one.batch_axis + 1] if several else shape[one.batch_axis])
    return observer.step(RewrittenTrace(item, item), max(sizes, default=0))


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
