"""Coordinators: decide what a failed step means for the workers of a job, for sessions and functions alike.

    steady ── a step fails ──────────► failed ── all agree to carry on ──► steady
       └───── somebody is missing ──► ended     every later run raises the same error

    Coordinator        nobody is waited for
    SingleProcess      replicas of one process wait for each other
    Workers            workers wait for each other, and carry on together after an error
    BoundedStaleness   workers update servers on their own, none too far ahead (`engine.staleness_clock`)

A session or a function calls its coordinator before and after each step, and for each error.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.digests import StepAccount, difference, disagreement
from autograph_rewrite.runtime.job.exchanges import Array, Flags, put
from autograph_rewrite.runtime.job.liveness import is_of_the_job, listed, missing, name_of, silent
from autograph_rewrite.runtime.job.tf_server import counts
from autograph_rewrite.runtime.job.watchdog import Question, Watchdog


class Coordinator:
    """Coordinates nothing: for an original program, or for replicas that never wait for each other.

    Args:
        watchdog: ends steps that wait in vain; None where a waiting step cannot be told from a working one.
    """

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog

    def check(self) -> None:
        """Raise the error by which the job has ended, if it has.

        Raises:
            ClusterError: the job has ended.
        """

    def before_step(self, *, updates: bool = True) -> None:
        """Wait until this worker may do a step.

        Raises:
            ClusterError: a worker is missing, or does something else.
        """

    def after_step(self, *, updates: bool = True) -> None:
        """Note that a step is done."""

    def step_failed(self, error: Exception | None = None) -> None:
        """Note that a step has failed, after an unknown part of its updates on each worker."""

    def end(self, problem: ClusterError) -> None:
        """Let every later run raise an error."""

    def failure(self, error: Exception, what: str, account: StepAccount | None) -> Exception | None:
        """Return what an error of TensorFlow means; None for one of the program's own computation.

        Args:
            account: this worker's description of the step; None where there is none.
        """
        return None

    def require_equal(self, account: StepAccount, table: Array) -> None:
        """Compare the inputs of the workers in a step.

        Args:
            table: the sizes and digests of all workers, one row for each.

        Raises:
            ClusterError: the inputs differ.
        """

    def close(self) -> None:
        """Let the other workers wait for this one no more."""


class SingleProcess(Coordinator):
    """Coordinates the replicas of one process, which meet in collectives."""

    def failure(self, error: Exception, what: str, account: StepAccount | None) -> ClusterError | None:
        """Return what a failure of a collective means; None for an error of the program's own computation."""
        text = str(getattr(error, "message", error))
        if self.watchdog is not None and self.watchdog.expired:
            return ClusterError(
                f"the step stood still for {self.watchdog.seconds:g} s: a replica waits for another in a collective",
                hint="report this, with the plan (`autograph-rewrite plan GRAPH --config CONFIG -o plan.yaml`): "
                "the order of collectives should have been proved; variables: shared needs none",
            )
        if "Collective ops is aborted" in text:
            return ClusterError(
                "a collective was aborted, and TensorFlow refuses all later ones of this process",
                where=text.strip().splitlines()[0][:300],
                hint="restart the program; variables: shared needs no collectives",
            )
        return None


class Workers(Coordinator):
    """Coordinates one process with the others of its job.

    Args:
        carry_on: lets all workers go on after an error on all of them; raises ClusterError if they do not.
        failed: exchanges failed steps with the other workers; None: each worker goes on by itself.
        abandon: gives up the session, and so the job, once a worker is missing; None: it can be used again.
    """

    watchdog: Watchdog

    def __init__(
        self,
        member: Membership,
        watchdog: Watchdog,
        carry_on: Callable[[], None],
        failed: FailedSteps | None = None,
        abandon: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(watchdog)
        self._member, self._carry_on, self._told, self._abandon = member, carry_on, failed, abandon
        self._failed = False
        self._problem: ClusterError | None = None

    def check(self) -> None:
        """Raise the error by which the job has ended, if it has."""
        if self._problem is not None:
            raise self._problem

    def before_step(self, *, updates: bool = True) -> None:
        """After an error, carry on together."""
        if self._failed and self._told is not None:
            self._carry_on()
        self._failed = False

    def step_failed(self, error: Exception | None = None) -> None:
        """Note that a step has failed, and tell the others: all have to agree before the next."""
        if not self._failed and self._told is not None:
            self._told.tell(error)
        self._failed = True

    def end(self, problem: ClusterError) -> None:
        """Let every later run raise an error."""
        self._problem = problem

    def failure(self, error: Exception, what: str, account: StepAccount | None) -> Exception | None:
        """Return the error of missing or failed workers, or of a difference; None for an error of the program."""
        if not self.watchdog.expired and not is_of_the_job(error):
            return None
        if self._told is not None and not self.watchdog.expired:
            may_be_told = type(error).__name__ != "DeadlineExceededError"
            left = self.watchdog.left or (self._told.awaited() if may_be_told else [])
            if left:
                found = self._told.error(left)
                self.step_failed(found)
                return found or ClusterError(
                    f"{self._member.name} could not {what}: it has failed on {listed(left)}",
                    hint="look at what it printed; it waits for the other workers to carry on together",
                )
        differs: Any = functools.partial(difference, self._member, account) if account is not None else None
        problem = missing(self._member, what, self.watchdog.seconds, error, self.watchdog.lost, differs)
        if self._abandon is not None:
            self.end(problem)
            self._abandon()
        return problem

    def require_equal(self, account: StepAccount, table: Array) -> None:
        """Compare the inputs of the workers in a step."""
        digests = table[:, 1:]
        if (digests != digests[0]).any():
            problem = disagreement(self._member, account, self.watchdog.seconds, digests)
            self.step_failed(problem)
            raise problem

    def close(self) -> None:
        """Do nothing: the other workers see that this process ends."""


# Failed steps: a worker whose step has failed puts its error into a list on its device, which the others read.
#
#     worker 0   step 3 fails ──► puts its error into the list on its device ──► waits for all, to carry on
#     worker 1   step 3 stands still, or is ended by worker 0's ──► raises the error of worker 0, carries on, too
#
# All workers raise the error that one device would have raised. A step that has failed on another worker does not
# always end here by itself: a request that is just being sent ignores TensorFlow's cancellation, and a request that
# reaches a process after its step has failed waits there for the next step. Then only a broken connection ends the step
# (seen once in twenty steps that fail on all workers, a second apart).

_NAME = "failed.steps"
_TELLS, _GLANCE = 3.0, 0.05
"""Seconds within which a worker whose step has failed says so, and between two looks at its list."""
_SAID = 4_000
"""Characters of an error that are kept for the others."""


class FailedSteps:
    """The failed steps that the workers of a job have told of; all workers carry on equally often."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._others = [task for task in range(len(member.workers)) if task != member.task]

    def tell(self, error: Exception | None = None) -> None:
        """Say that one more step of this worker has failed, and that it waits for the others to carry on."""
        code = getattr(error, "error_code", None)
        is_own = error is not None and code is not None and not is_of_the_job(error)
        text = json.dumps([code, str(getattr(error, "message", error))[:_SAID]]) if is_own else ""
        counts().failures += 1
        with suppress(tensorflow().errors.OpError):  # then the others wait for their whole timeout
            put(self._member, _NAME, [self._member.task], text=text)

    def ahead(self) -> list[str]:
        """Return the workers that have had more failed steps than this one: they wait for it to carry on.

        Raises:
            tf.errors.OpError: a worker does not answer.
        """
        with closing(Flags(self._member, _NAME, self._others)) as flags:
            mine, theirs = counts().failures, flags.counts()
        return [self._name(task) for task, count in zip(self._others, theirs, strict=True) if count > mine]

    def awaited(self) -> list[str]:
        """Wait until workers are ahead, and return them; none after `_TELLS` seconds, or if one does not answer."""
        return self._answer(self.ahead)

    def error(self, ahead: Sequence[str]) -> Exception | None:
        """Return the program's error on a worker that is ahead; None if it was no error of the program."""
        name, text = self._answer(functools.partial(self._told, ahead)) or ("", "")
        if not text:
            return None
        code, message = json.loads(text)
        kind = tensorflow().compat.v1.errors.exception_type_from_error_code(code)
        made: Exception = kind(None, None, f"on {name}: {message}")
        return made

    def _told(self, ahead: Sequence[str]) -> list[str]:
        """Return a worker that is ahead and has told of an error, and the text; "" if there is none."""
        at = counts().failures
        for task in self._others:
            if self._name(task) in ahead:
                with closing(Flags(self._member, _NAME, [task])) as flags:
                    text = flags.texts(at)[0]
                if text:
                    return [self._name(task), text]
        return ["", ""]

    def _answer(self, ask: Callable[[], list[str]]) -> list[str]:
        """Return the first answer that is not empty; [] if there is none in time, as for a process that is gone."""
        question, ends = Question(ask), time.monotonic() + _TELLS
        while time.monotonic() < ends and not silent(self._member):
            if found := question.answer():
                return found
            time.sleep(_GLANCE)
        return []

    def _name(self, task: int) -> str:
        return name_of("worker", task, self._member.workers[task])
