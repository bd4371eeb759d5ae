"""Coordinators: what a failed step means for the workers of a job, alike for sessions and functions.

    steady ── a step fails ──────────► failed ── all agree to carry on ──► steady
       └───── somebody is missing ──► ended     every later run raises the same error

    Coordinator        nobody is waited for
    SingleProcess      replicas of one process wait for each other
    Workers            workers wait for each other, and carry on together after an error
    BoundedStaleness   workers update servers on their own, none too far ahead (`engine.staleness_clock`)

A session or a function asks its own before and after each step, and about each error.
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
from autograph_rewrite.runtime.job.digests import StepAccount, agree, difference, disagreement
from autograph_rewrite.runtime.job.exchanges import Array, Flags, put
from autograph_rewrite.runtime.job.liveness import is_of_the_job, listed, missing, name_of, silent
from autograph_rewrite.runtime.job.tf_server import counts
from autograph_rewrite.runtime.job.watchdog import Question, Watchdog


class Coordinator:
    """Coordinates nothing: of an original program, or of replicas that never wait for each other.

    Args:
        watchdog: ends steps that wait in vain; None where that cannot be told.
    """

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog

    def check(self) -> None:
        """Raise the error by which the job has ended.

        Raises:
            ClusterError: it has.
        """

    def before_step(self, *, updates: bool = True) -> None:
        """Wait until this worker may do a step.

        Raises:
            ClusterError: somebody is missing, or does something else.
        """

    def after_step(self, *, updates: bool = True) -> None:
        """Note that a step is done."""

    def step_failed(self, error: Exception | None = None) -> None:
        """Note that a step has failed: nobody knows what each worker had updated."""

    def end(self, problem: ClusterError) -> None:
        """Let every later run raise an error."""

    def failure(self, error: Exception, what: str, account: StepAccount | None) -> Exception | None:
        """Return what an error of TensorFlow means; None for one of the program's own computation.

        Args:
            account: what this worker tells of it; None: nothing.
        """
        return None

    def require_equal(self, account: StepAccount, table: Array) -> None:
        """Compare what the workers were given in a step.

        Args:
            table: sizes and digests of all, one row for each.

        Raises:
            ClusterError: they were not given the same.
        """

    def close(self) -> None:
        """Hold nobody up any more."""


class SingleProcess(Coordinator):
    """Of one process, whose replicas meet in collectives."""

    def failure(self, error: Exception, what: str, account: StepAccount | None) -> ClusterError | None:
        """Return what a failure of a collective means; None for an error of the program's own computation."""
        text = str(getattr(error, "message", error))
        if self.watchdog is not None and self.watchdog.expired:
            return ClusterError(
                f"the step stood still for {self.watchdog.seconds:g} s: a replica waits for another in a collective",
                hint="report this, with the plan: the order of collectives should have been proved; "
                "variables: shared needs none",
            )
        if "Collective ops is aborted" in text:
            return ClusterError(
                "a collective was aborted, and TensorFlow refuses all later ones of this process",
                where=text.strip().splitlines()[0][:300],
                hint="restart the program; variables: shared needs no collectives",
            )
        return None


class Workers(Coordinator):
    """Of one of several processes.

    Args:
        watchdog: ends steps that wait for somebody who is missing.
        carry_on: lets all workers go on after an error of all; raises ClusterError if they do not.
        failed: tells the others of steps that fail, and of theirs; None: each goes on by itself.
        abandon: leaves behind what ran when somebody was missing, so that the job ends; None: it can be used again.
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
        """Raise the error by which the job has ended."""
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
        """Return who is missing, or what has failed on another worker, or what the workers do differently.

        None for an error of the program's own.
        """
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
        """Compare what the workers were given in a step."""
        if not agree(table):
            problem = disagreement(self._member, account, self.watchdog.seconds, table[:, 1:])
            self.step_failed(problem)
            raise problem

    def close(self) -> None:
        """Hold nobody up any more: others see that this process ends."""


# Failed steps: a worker whose step has failed says so on its own device, with its error, where others look.
#
#     worker 0   step 3 fails ──► puts its error into the list on its device ──► waits for all, to carry on
#     worker 1   step 3 stands still, or is ended by worker 0's ──► raises the error of worker 0, carries on, too
#
# What one device would have raised is raised by all. A step that another has left does not always end by itself:
# TensorFlow's cancellation is not heard by a request that is just being sent, and a request that reaches a process
# after its step has failed waits there for the next one. Then nothing but the connection's end ends the step (seen once
# in twenty steps that fail on all workers, a second apart).

_NAME = "failed.steps"
_TELLS, _GLANCE = 3.0, 0.05
"""Seconds within which a worker whose step has failed says so, and between two looks."""
_SAID = 4_000
"""Characters of an error that are kept for the others."""


class FailedSteps:
    """What the workers of a job have told of steps that failed; all of them carry on equally often."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._others = [task for task in range(len(member.workers)) if task != member.task]

    def tell(self, error: Exception | None = None) -> None:
        """Say that one more step of this worker has failed, and that it waits for the others to carry on."""
        code = getattr(error, "error_code", None)
        is_own = error is not None and code is not None and not is_of_the_job(error)
        text = json.dumps([code, str(getattr(error, "message", error))[:_SAID]]) if is_own else ""
        counts().failures += 1
        with suppress(tensorflow().errors.OpError):  # the others then wait as long as they are patient
            put(self._member, _NAME, [self._member.task], text=text)

    def ahead(self) -> list[str]:
        """Return the other workers of whom more steps have failed than of this one: they wait for it to carry on.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        with closing(Flags(self._member, _NAME, self._others)) as flags:
            mine, theirs = counts().failures, flags.counts()
        return [self._name(task) for task, count in zip(self._others, theirs, strict=True) if count > mine]

    def awaited(self) -> list[str]:
        """Return who is ahead once somebody is; nobody if that takes too long, or somebody does not answer."""
        return self._answer(self.ahead)

    def error(self, ahead: Sequence[str]) -> Exception | None:
        """Return what the program has raised on one of those who are ahead; None where it was nothing of its own."""
        name, text = self._answer(functools.partial(self._told, ahead)) or ("", "")
        if not text:
            return None
        code, message = json.loads(text)
        kind = tensorflow().compat.v1.errors.exception_type_from_error_code(code)
        made: Exception = kind(None, None, f"on {name}: {message}")
        return made

    def _told(self, ahead: Sequence[str]) -> list[str]:
        """Return who of those that are ahead has told of an error, and what; "": nobody."""
        at = counts().failures
        for task in self._others:
            if self._name(task) in ahead:
                with closing(Flags(self._member, _NAME, [task])) as flags:
                    text = flags.texts(at)[0]
                if text:
                    return [self._name(task), text]
        return ["", ""]

    def _answer(self, ask: Callable[[], list[str]]) -> list[str]:
        """Return the first answer that is not empty; a new session waits without end for who has just gone."""
        question, ends = Question(ask), time.monotonic() + _TELLS
        while time.monotonic() < ends and not silent(self._member):
            if found := question.answer():
                return found
            time.sleep(_GLANCE)
        return []

    def _name(self, task: int) -> str:
        return name_of("worker", task, self._member.workers[task])
