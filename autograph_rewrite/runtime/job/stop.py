"""Stop all workers between the same two steps when one is asked to end: save, and end.

    worker 0   step 6 begun ── SIGTERM ─► tells worker 1, holds before 7, "6 begun" ─┐
    worker 1   step 7 waits for worker 0 ──────────── told ────────────── "7 begun" ─┴─► all end behind step 7
    worker 0   step 7 ─► saves ─► exit code 143

A process that does not reach its next step in time ends by force, and prints why: within the grace time, or at once if
a worker that the step needs has ended. A step is a call of the function, or a run of the session, that began the loop:
the first of several that alternate, as those of two optimizers.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograph_rewrite.cluster.launchers import TF_CONFIG, rank_of
from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ConfigError, Preempted, RewriteError
from autograph_rewrite.runtime.job import exchanges
from autograph_rewrite.runtime.job.background_thread import repeat
from autograph_rewrite.runtime.job.exchanges import STOPS, RepeatedSum
from autograph_rewrite.runtime.job.liveness import ask, listed, others
from autograph_rewrite.runtime.job.signals import GRACE, grace, listen, name_of_signal
from autograph_rewrite.training_graph import RewrittenTrace

BY_SIGNAL = 128
"""The exit code is this plus the signal's number, as in shells."""
FLAG = "stop"
"""The flag on a worker's device that asks it to end together with all others."""
_LOOK = 0.5
"""Seconds between two looks whether another worker was asked to end."""
_GLANCE, _PATIENCE = 0.2, 1.0
"""Seconds between two looks at the workers that a step needs, and for their answer."""
_LEADERLESS = 100
"""Steps of other functions without a step of the leader, after which one of them leads the loop."""

Hook = Callable[[], Any]


@dataclass
class _Block:
    """A block of calls that count as one step."""

    who: object
    is_begun: bool


class Stop:
    """Counts the steps of this process, and stops it after the step on which all workers agree."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._hooks: list[Hook] = []
        self._leader: object = None
        self._without_leader = 0
        self._member: Membership | None = None
        self._together = self._is_armed = self._in_step = self._decides = self._is_ending = False
        self._number: int | None = None
        self._last: int | None = None
        self._block: _Block | None = None
        self.steps = 0

    @classmethod
    @functools.cache
    def here(cls) -> Stop:
        """Return the instance of this process."""
        return cls()

    def add(self, hook: Hook) -> None:
        """Call a function before the process ends, on all workers; it may return a text about what it has saved."""
        self._hooks.append(hook)

    def remove(self, hook: Hook) -> None:
        """Undo `add`."""
        self._hooks.remove(hook)

    def begin_loop(self) -> None:
        """Let the function or session of the next step lead the loop."""
        self._leader = None

    @contextmanager
    def one_step(self, who: object) -> Iterator[None]:
        """Let all calls in this context count as one step, or stop before it.

        Raises:
            Preempted: as `step`.
            KeyboardInterrupt: the same.
        """
        if self._is_armed and self._leads(who):
            self._pass()
        self._block = _Block(who, is_begun=self._is_armed)
        try:
            yield
        finally:
            self._block = None

    @contextmanager
    def step(self, who: object, report: Any) -> Iterator[None]:
        """Run one step, or stop before it.

        Raises:
            Preempted: the process was asked to end, and all workers end here.
            KeyboardInterrupt: the same, by Ctrl-C.
        """
        if not self._is_armed:
            self._arm(report)
        if self._leads(who):
            self._pass()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _leads(self, who: object) -> bool:
        """Return whether a step counts: `who` leads the loop, and the step begins its block, if there is one."""
        if self._block is not None:
            if self._block.is_begun:
                return False
            who, self._block.is_begun = self._block.who, True
        if self._leader is None or self._without_leader >= _LEADERLESS:
            self._leader = who
        self._without_leader = 0 if who is self._leader else self._without_leader + 1
        return who is self._leader

    def _pass(self) -> None:
        """Count a step, or end if all workers stop before it."""
        with self._state:
            while self._decides:
                self._state.wait()
            if self._last is None or self.steps < self._last:
                self.steps += 1
                return
        self._end()

    def _end(self) -> None:
        assert self._number is not None
        self._is_ending = True
        saved = [text for hook in list(self._hooks) if isinstance(text := hook(), str)]
        what = f"saved {listed(saved)}" if saved else "nothing to save was registered"
        _say(f"{self._me} ends after step {self.steps}, as {name_of_signal(self._number)} asks for; {what}")
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Preempted(BY_SIGNAL + self._number)

    @property
    def _me(self) -> str:
        return self._member.name if self._member is not None else "the program"

    @property
    def _tasks(self) -> list[int]:
        """The other workers."""
        member = self._member
        return [task for task in range(len(member.workers)) if task != member.task] if member is not None else []

    def _arm(self, report: Any) -> None:
        """Listen to signals, and look for other workers that have received one."""
        self._is_armed = True
        if report is not None and report.member is not None:
            self._member, self._together = report.member, not report.plan.is_asynchronous
        listen(self.notice)
        if self._tasks:
            assert self._member is not None
            mine = exchanges.Flags(self._member, FLAG, [self._member.task])

            def look() -> bool:
                with suppress(Exception):
                    if self._number is None and mine.counts() != [0]:
                        self.notice(signal.SIGTERM, tells=False)
                if self._number is None:
                    return True
                mine.close()
                return False

            repeat(look, _LOOK)

    def notice(self, number: int, *, tells: bool = True) -> None:
        """Begin to stop this process; a second Ctrl-C ends it at once."""
        with self._state:
            if self._number is not None:
                if number == signal.SIGINT:
                    self._force("a second Ctrl-C")
                return
            self._number, self._decides = number, True
        ends = time.monotonic() + of_grace(grace())
        threading.Thread(target=self._watch, args=(ends,), name="autograph_deadline", daemon=True).start()
        threading.Thread(target=self._decide, args=(ends, tells), name="autograph_stop", daemon=True).start()

    def _decide(self, ends: float, tells: bool) -> None:
        """Agree with all other workers after which step to stop."""
        last = self.steps
        try:
            are_there = bool(self._tasks) and not self._silent()
            if tells and are_there:
                assert self._member is not None
                exchanges.put(self._member, FLAG, self._tasks)
            if are_there or (self._together and self._tasks):
                last = self._furthest(max(1.0, ends - time.monotonic()))
        except Exception as error:
            problem = str(error).partition("\n")[0] if isinstance(error, RewriteError) else "a worker does not answer"
            self._force(f"the workers could not agree where to stop: {problem}")
        with self._state:
            self._last, self._decides = last, False
            self._state.notify_all()

    def _furthest(self, seconds: float) -> int:
        """Return the largest number of steps that any worker has begun."""
        assert self._member is not None
        begun = exchanges.table_of(self._member, np.array(self.steps, np.int64))
        with RepeatedSum(self._member, seconds, begun, STOPS, STOPS) as exchange:
            return int(exchange.add_up(begun, "stop together").max())

    def _watch(self, ends: float) -> None:
        """End the process by force when time is up, or as soon as it waits for a worker that has ended."""
        silent: list[str] = []
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(_GLANCE, left))
            patience = min(_PATIENCE, left - 2 * _GLANCE)
            if patience > 0:  # an answer that comes too late would delay the end
                silent = self._silent(patience) if self._waits else []
        if self._is_ending:
            self._force("saving took too long")
        self._force(f"{listed(silent)} does not answer" if silent else "it did not come to its next step in time")

    @property
    def _waits(self) -> bool:
        """Whether this worker may wait for others."""
        return self._together and bool(self._tasks) and (self._in_step or self._decides)

    def _silent(self, patience: float = _PATIENCE) -> list[str]:
        """Return the workers that do not answer; end by force if this one waits for a worker that has ended."""
        assert self._member is not None
        statuses = ask(others(self._member, {"worker": self._member.workers}), patience)
        gone = [name for name, status in statuses.items() if status == "UNAVAILABLE"]
        if gone and self._waits:
            self._force(f"{listed(gone)} has ended already")
        return [name for name, status in statuses.items() if status != "OK"]

    def _force(self, why: str) -> None:
        assert self._number is not None
        where = "after" if self._is_ending else "in"
        told = f"ends {where} step {self.steps}, as {name_of_signal(self._number)} asks for, by force"
        _say(f"{self._me} {told}: {why}")
        os._exit(BY_SIGNAL + self._number)


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process stops between steps: it is in a job, or `launch` or `run` has started it."""
    try:
        return bool(environ.get(GRACE) or environ.get(TF_CONFIG) or rank_of(environ) is not None)
    except ConfigError:
        return True


def of_grace(seconds: float) -> float:
    """Return the seconds in which to stop; the rest of the time until the kill is for ending the process."""
    return seconds - min(2.0, seconds / 5)


def _say(text: str) -> None:
    with suppress(Exception):
        print(f"autograph_rewrite: {text}", file=sys.stderr, flush=True)


# The boundary before each step of a function or session, at which the process stops.


class StepBoundary:
    """Observes the steps of one function or session."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def step(self, trace: RewrittenTrace, _: int | None) -> AbstractContextManager[None]:
        """Return a context in which one step runs, unless the process stops before it."""
        return self._stop.step(self, trace.rewritten.report)


def requested() -> StepBoundary | None:
    """Return a boundary for a function or session; None where signals have Python's usual effect."""
    return StepBoundary(Stop.here()) if is_wanted() else None
