"""Bounded staleness: the step counters of all workers, none of which may run ahead by more than a limit.

    server    autograph_clock/0 = 17    autograph_clock/1 = 15    ...      one counter for each worker
    worker 0  staleness 2: waits before step 18 until worker 1 has done 16

Counters only grow, so that looking at them and going on is no race. A worker that has ended holds nobody up; one that
was killed is named.

Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (2013).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.agreement import common_name
from autograph_rewrite.runtime.consensus.coordinator import Coordinator
from autograph_rewrite.runtime.consensus.divergence import Account
from autograph_rewrite.runtime.failures.failure_messages import missing
from autograph_rewrite.runtime.failures.liveness import PeerMonitor, name_of

ENDED = np.int64(2**62)
_LOOK = 0.001
"""Seconds between two looks at the others, at first."""
_RARELY = 0.05
_ASK = 1.0
"""Seconds of waiting after which, again and again, we ask whether the others are still there."""
_LAST = 2_000
"""Milliseconds that a program which ends takes to say so."""


class StalenessBound:
    """The counters of one session's workers.

    Args:
        session: a tf.compat.v1.Session that reaches the servers.
        run: runs something in it, and watches over the other processes meanwhile.
        plan: with its staleness.
        member: this process.
        container: where the session's servers keep what is its own.

    Attributes:
        counts: the steps that each worker had done when it was last looked at.
    """

    def __init__(self, session: Any, run: Callable[..., Any], plan: Plan, member: Membership, container: str) -> None:
        tf = tensorflow()
        self._run, self._member = run, member
        self._seconds, self._bound = plan.timeout_seconds, plan.staleness or 0
        self._done = 0
        raw = tf.raw_ops
        with session.graph.as_default(), tf.device(min(plan.homes.values())):
            handles = [
                raw.VarHandleOp(dtype=tf.int64, shape=[], shared_name=f"autograph_clock/{task}", container=container)
                for task in range(len(member.workers))
            ]
            self._number = tf.compat.v1.placeholder(tf.int64, [])
            self._write = raw.AssignVariableOp(resource=handles[member.task], value=self._number)
            self._read = tf.stack([raw.ReadVariableOp(resource=handle, dtype=tf.int64) for handle in handles])
        self._set(0)
        options = tf.compat.v1.RunOptions(timeout_in_ms=_LAST)
        self._end = weakref.finalize(self, _end, session, self._write, {self._number: ENDED}, options)
        common_name(member, plan.timeout_seconds)  # all counters are there
        self.counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(len(handles), np.int64)

    def _set(self, number: int) -> None:
        self._run(self._write, {self._number: number})

    def wait(self) -> None:
        """Wait until this worker may do another step.

        Raises:
            ClusterError: somebody stays behind.
        """
        began = asked = time.monotonic()
        pause, lookout = _LOOK, PeerMonitor(self._member, self._seconds)
        while self._is_ahead():
            now = time.monotonic()
            if now - began > self._seconds:
                raise self._left_behind()
            if now - asked > _ASK:
                asked, lost = now, lookout.lost()
                if self._is_ahead() and self._slowest in lost:
                    what = f"do step {self.counts.min() + 1}"
                    raise missing(self._member, what, self._seconds, lost=[self._slowest])
            time.sleep(pause)
            pause = min(2 * pause, _RARELY)

    def _is_ahead(self) -> bool:
        """Return whether another step would be too far ahead of somebody, who is looked at only then."""
        if self._done + 1 - self.counts.min() > self._bound:
            self.counts = self._run(self._read)
        return bool(self._done + 1 - self.counts.min() > self._bound)

    @property
    def _slowest(self) -> str:
        task = int(self.counts.argmin())
        return name_of("worker", task, self._member.workers[task])

    def _left_behind(self) -> ClusterError:
        steps = self.counts.min()
        problem = (
            f"{self._member.name} waited {self._seconds:g} s for {self._slowest}, "
            f"which has done {steps} steps, {self._done - steps} fewer"
        )
        return ClusterError(problem, hint="look at what it printed last; a larger staleness waits later")

    def step(self) -> None:
        """Count a step that is done."""
        self._done += 1
        self._set(self._done)

    def close(self) -> None:
        """Hold nobody up any more."""
        self._end()


class BoundedStaleness(Coordinator):
    """Workers that update servers on their own, none too far ahead of another.

    Args:
        workers: what becomes of a run that fails.
        clock: the counters of all.
    """

    def __init__(self, workers: Coordinator, clock: StalenessBound) -> None:
        super().__init__(workers.watchdog)
        self._workers, self.clock = workers, clock

    def check(self) -> None:
        """Raise the error by which the job has ended."""
        self._workers.check()

    def before_step(self, *, updates: bool = True) -> None:
        """Wait for who is behind."""
        if updates:
            self.clock.wait()

    def after_step(self, *, updates: bool = True) -> None:
        """Count a step."""
        if updates:
            self.clock.step()

    def end(self, problem: ClusterError) -> None:
        """Let every later run raise an error."""
        self._workers.end(problem)

    def failure(self, error: Exception, what: str, account: Account | None) -> Exception | None:
        """Return who is missing; None for an error of the program's own computation.

        Args:
            error: of a run.
            what: the run was to do, for messages.
            account: what this worker tells of it; None: nothing.
        """
        return self._workers.failure(error, what, account)

    def close(self) -> None:
        """Hold nobody up any more."""
        with suppress(ClusterError):  # a job that has ended is told nothing
            self.check()
            self.clock.close()


def _end(session: Any, write: Any, feeds: Any, options: Any) -> None:
    """Say that this worker has ended; where nobody can be told any more, nobody waits."""
    with suppress(Exception):
        session.run(write, feeds, options)
