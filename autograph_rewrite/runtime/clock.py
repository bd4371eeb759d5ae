"""How far each worker has come, where none may be more than some steps ahead of another (stale-synchronous workers).

    server    autograph_clock/0 = 17    autograph_clock/1 = 15    ...      one counter for each worker
    worker 0  staleness 2: waits before step 18 until worker 1 has done 16

Counters only grow, so that looking at them and going on is no race. A worker that has ended holds nobody up.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.membership import Membership
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.agreement import common_name

ENDED = np.int64(2**62)
_LOOK = 0.001
"""Seconds between two looks at the others, at first."""
_RARELY = 0.05


class Clock:
    """The counters of one session's workers.

    Args:
        session: a tf.compat.v1.Session that reaches the servers.
        plan: with its staleness.
        member: this process.
        container: where the session's servers keep what is its own.

    Attributes:
        counts: the steps that each worker had done when it was last looked at.
    """

    def __init__(self, session: Any, plan: Plan, member: Membership, container: str) -> None:
        tf = tensorflow()
        self._session, self._member = session, member
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
        common_name(member, plan.timeout_seconds)  # all counters are there
        self.counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(len(handles), np.int64)

    def _set(self, number: int) -> None:
        self._session.run(self._write, {self._number: number})

    def wait(self) -> None:
        """Wait until this worker may do another step.

        Raises:
            ClusterError: somebody stays behind.
        """
        began, pause = time.monotonic(), _LOOK
        while self._done + 1 - self.counts.min() > self._bound:
            self.counts = self._session.run(self._read)
            if self._done + 1 - self.counts.min() <= self._bound:
                return
            if time.monotonic() - began > self._seconds:
                last = int(self.counts.argmin())
                problem = (
                    f"{self._member.name} waited {self._seconds:g} s for worker {last} ({self._member.workers[last]}), "
                    f"which has done {self.counts[last]} steps, {self._done - self.counts[last]} fewer"
                )
                raise ClusterError(problem, hint="look at what it printed last; a larger staleness waits later")
            time.sleep(pause)
            pause = min(2 * pause, _RARELY)

    def step(self) -> None:
        """Count a step that is done."""
        self._done += 1
        self._set(self._done)

    def close(self) -> None:
        """Hold nobody up any more."""
        self._set(ENDED)
