"""Run an elastic job: when a worker is lost, the others go on as the next generation, from a snapshot in memory.

    generation 1   worker 0   worker 1 ✕   worker 2       killed, stopped, or blamed by those who waited for it
                       ▼                       ▼          all are ended: who was expelled cannot write any more
    generation 2   worker 0                worker 1       forked, with TensorFlow imported; the script runs again and
                                                          is at the snapshot before its first step

Who was lost is replaced at the end of an epoch, as often as there are restarts; at once if too few would be left.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from autograph_rewrite.runtime.elastic.job_memory import EXPELLED, RANK, JobMemory, OwnedMemory
from autograph_rewrite.tools.launcher.attempt import Manner, Outcome, Reason, Signals, Started
from autograph_rewrite.tools.launcher.forked import ForkedChild, import_once
from autograph_rewrite.tools.launcher.job import (
    Options,
    Summary,
    exit_code,
    explain,
    noted_signals,
    say,
    start,
)
from autograph_rewrite.tools.launcher.process import Task

STOPPED, SILENT = 3, 10
"""After how many heartbeats without a sign of life a worker is lost: one that is stopped; any other."""
WORKER = "worker "


@dataclass(frozen=True)
class Bounds:
    """How many workers an elastic job may have, and how often they give a sign of life, in seconds."""

    least: int
    most: int
    heartbeat: float = 1.0


@dataclass
class Generation:
    """What became of one generation, for the summary."""

    workers: int
    began: float = field(default_factory=time.time)
    stepped: float | None = None
    ended: float | None = None
    why: str = ""
    silent: float = 0.0

    def data(self) -> dict[str, Any]:
        """The generation as plain data: seconds from its beginning to its first step, and why it ended."""
        to_step = round(self.stepped - self.began, 3) if self.stepped is not None else None
        return {"workers": self.workers, "to_first_step": to_step, "why": self.why, "silent": round(self.silent, 3)}


class Elastic:
    """Runs one elastic job.

    Args:
        tasks: makes the processes of a generation, given how many workers it has and its memory.
        body: what each process does.
        options: how to run them.
        bounds: how many workers there may be.
    """

    def __init__(
        self,
        tasks: Callable[[int, JobMemory], Sequence[Task]],
        body: Callable[[Task], int],
        options: Options,
        bounds: Bounds,
    ) -> None:
        self._tasks, self._body, self._options, self._bounds = tasks, body, options, bounds
        self._restarts = options.restarts
        self._absent = 0  # workers that join when they can
        self._more = False  # somebody asks for as many workers as there may be
        self.generations: list[Generation] = []

    def run(self) -> Summary:
        """Run the job to its end."""
        began = time.monotonic()
        deadline = None if self._options.timeout is None else began + self._options.timeout
        import_once()
        with OwnedMemory() as owned, noted_signals() as signals, self._noted_requests():
            outcome = self._generations(owned, signals, deadline)
        explain(outcome, self._options, signals.received)
        code = exit_code(outcome, signals.received) if outcome.reason is None or signals.received else 1
        return Summary(code, len(self.generations) - 1, time.monotonic() - began, outcome)

    def _generations(self, owned: OwnedMemory, signals: Signals, deadline: float | None) -> Outcome:
        workers = self._bounds.most
        while True:
            memory = owned.begin(len(self.generations) + 1)
            mine = Generation(workers)
            self.generations.append(mine)
            if self._absent:
                memory.let_join()
            manner = Manner(self._fork, lambda running, m=memory: self._look(running, m), is_hasty=True)  # type: ignore[misc]
            tasks = self._tasks(workers, memory)
            is_first = len(self.generations) == 1
            outcome = start(tasks, self._options, signals, deadline, is_first=is_first, manner=manner)
            mine.ended, mine.stepped = time.time(), memory.stepped
            if signals.received is not None or outcome.late or not (outcome.failed or outcome.reason):
                return outcome
            lost = self._lost(outcome, memory)
            mine.why = outcome.problem if not lost or outcome.failed in lost else f"{', '.join(lost)} did not answer"
            following = self._next(workers, lost, has_stepped=mine.stepped is not None)
            if following is None:
                return outcome
            workers = following
            number = len(self.generations) + 1
            say(self._options, f"{mine.why}: generation {number} goes on with {_counted(workers)}")

    def _fork(self, task: Task, _: bool) -> Started:
        return ForkedChild(task, self._body)

    def _look(self, running: Sequence[Started], memory: JobMemory) -> Reason | None:
        """Return who gives no sign of life, or that others can join."""
        for child in running:
            silence = memory.silence(int(child.task.environment[RANK])) / self._bounds.heartbeat
            is_stopped = isinstance(child, ForkedChild) and child.is_stopped()
            if silence > (STOPPED if is_stopped else SILENT):
                self.generations[-1].silent = silence * self._bounds.heartbeat
                how = "is stopped" if is_stopped else "gives no sign of life"
                return Reason(f"{child.task.name} {how}", child.task.name)
        if self._more and not memory.lets_join:
            self._more = False
            self._absent = max(self._absent, self._bounds.most - self.generations[-1].workers)
            if self._absent:
                memory.let_join()
        if memory.waits:
            return Reason(f"{_counted(self._absent)} can join")
        return None

    def _lost(self, outcome: Outcome, memory: JobMemory) -> list[str]:
        """Return who is lost: who failed, unless it waited in vain for others."""
        if outcome.reason is not None and outcome.reason.lost is None:
            return []
        ranks = [int(name.removeprefix(WORKER)) for name in outcome.codes if name.startswith(WORKER)]
        alive = [rank for rank in ranks if outcome.codes[f"{WORKER}{rank}"] not in (-signal.SIGKILL, EXPELLED)]
        failed = outcome.failed or ""
        if outcome.codes.get(failed, 0) > 0 and outcome.reason is None:
            for rank in sorted(alive):
                blamed = memory.blamed(rank)
                if blamed:  # of two that blame each other, the first goes on
                    return [f"{WORKER}{other}" for other in blamed]
        return [failed]

    def _next(self, workers: int, lost: Sequence[str], *, has_stepped: bool) -> int | None:
        """Return how many workers go on; None if there are too few."""
        if not lost:  # others join
            workers, self._absent = workers + self._absent, 0
            return min(workers, self._bounds.most)
        servers = [name for name in lost if not name.startswith(WORKER)]
        if servers and not has_stepped:  # a server that never serves would be replaced for ever
            if not self._restarts:
                return None
            self._restarts -= 1
        gone = len(lost) - len(servers)
        back = min(gone, self._restarts)
        left, self._restarts = workers - gone, self._restarts - back
        at_once = min(back, max(0, self._bounds.least - left))
        self._absent += back - at_once
        left += at_once
        return left if left >= self._bounds.least else None

    @contextmanager
    def _noted_requests(self) -> Iterator[None]:
        """Take SIGUSR1 as the request to let as many workers join as there may be."""

        def note(_: int, __: FrameType | None) -> None:
            self._more = True

        before = signal.signal(signal.SIGUSR1, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)


def _counted(workers: int) -> str:
    return f"{workers} worker" + ("s" if workers != 1 else "")
