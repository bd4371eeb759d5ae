"""A recording: the steps of something distributed between two moments, of all ranks of its job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.inspect.profile.profile import Profile
from autograph_rewrite.runtime.tracing.all_ranks import Ranks
from autograph_rewrite.runtime.tracing.prediction import prediction
from autograph_rewrite.runtime.tracing.tracer import StepObserver, Tracer
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph


class Observed(Protocol):
    """What tells of its steps: a distributed function, or a session."""

    observer: StepObserver | None


class Recording:
    """A recording under way, which all ranks begin and end together; it begins when it is made.

    Args:
        observed: what is told of; it has run before.
        items: what was rewritten of it.

    Attributes:
        ranks: of the job.
        tracer: is told of every step.

    Raises:
        GraphError: TensorFlow's profiler is running already.
        ClusterError: a rank is missing.
    """

    def __init__(self, observed: Sequence[Observed], items: Sequence[TrainingGraph]) -> None:
        self._observed = [(one, one.observer) for one in observed]
        self.ranks = Ranks(items)
        self._marks = self.ranks.meet()
        self.tracer = Tracer()
        self.tracer.start()
        for one in observed:
            one.observer = self.tracer

    def cancel(self) -> None:
        """End it, and forget what was recorded."""
        self._let_go()
        self.tracer.cancel()

    def end(self, original: TrainingGraph | None = None, machine: Machine | None = None) -> Profile:
        """End it, and return what all ranks have recorded.

        Args:
            original: what was rewritten, where what ran does not know.
            machine: how fast devices are, for the prediction; None: round figures.

        Raises:
            GraphError: no step ran.
            ClusterError: a rank is missing.
        """
        self._let_go()
        trace = self.tracer.stop(self._marks)
        said: tuple[Any, Any] = None, ()
        if self.ranks.is_chief and self.tracer.traces:
            first = self.tracer.traces[0]
            what = first if original is None else RewrittenTrace(original, first.rewritten)
            said = prediction(what, self.tracer.examples[0] * self.ranks.cut_among(first.rewritten), machine)
        traces, text = self.ranks.gather(trace, json.dumps(said))
        return Profile.of(traces, *json.loads(text))

    def _let_go(self) -> None:
        for one, before in self._observed:
            one.observer = before
