"""A recording: the steps of something distributed between two moments, of all ranks of its job."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.inspect.profile.profile import Profile
from autograph_rewrite.inspect.profile.rank_trace import RankTrace
from autograph_rewrite.runtime.consensus.rendezvous import Rendezvous
from autograph_rewrite.runtime.preemption import step_boundary
from autograph_rewrite.runtime.progress import report
from autograph_rewrite.runtime.tracing import requested
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


# The traces of all ranks of a job: meet to compare clocks, trace the same steps, hand everybody all traces.


ROUNDS = 8
"""How often ranks meet before the steps: the quickest round says most about their clocks."""
WHAT = "profile steps"


class Ranks:
    """All ranks of the job that something runs in; one process alone is the only one.

    Args:
        items: rewritten, that are profiled.
    """

    def __init__(self, items: Sequence[TrainingGraph]) -> None:
        reports = [item.report for item in items if item.report is not None and item.report.member is not None]
        self._job: tuple[Membership, float] | None = None
        if reports and len(reports[0].member.workers) > 1:
            self._job = reports[0].member, reports[0].plan.timeout_seconds

    @property
    def is_chief(self) -> bool:
        """Whether this is the first rank."""
        return self._job is None or self._job[0].is_chief

    def cut_among(self, item: TrainingGraph) -> int:
        """Return how many ranks give examples of their own to a step."""
        if self._job is None or (item.report is not None and item.report.plan.is_driven):
            return 1
        return len(self._job[0].workers)

    def meet(self) -> list[tuple[int, int]]:
        """Wait for all ranks; return when exchanges with them began and ended.

        Raises:
            ClusterError: somebody is missing.
        """
        return [] if self._job is None else Rendezvous(*self._job).rounds(ROUNDS, WHAT)

    def gather(self, trace: RankTrace, extra: str) -> tuple[list[RankTrace], str]:
        """Return the traces of all ranks, and what the first one says beside its own.

        Raises:
            ClusterError: somebody is missing.
        """
        if self._job is None:
            return [trace], extra
        mine = zlib.compress(json.dumps([trace.data(), extra]).encode())
        said = [json.loads(zlib.decompress(data)) for data in Rendezvous(*self._job).contents(mine, WHAT)]
        return [RankTrace.of(data) for data, _ in said], said[0][1]


# Who is told of the steps of a function or session, as the environment asks.
#
# They are what stops between two steps, a profile, and how far the process has come.


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
