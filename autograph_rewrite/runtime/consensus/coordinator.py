"""Coordinators: what a failed step means for the workers of a job, alike for sessions and functions.

    steady ── a step fails ──────────► failed ── all agree to carry on ──► steady
       └───── somebody is missing ──► ended     every later run raises the same error

    Coordinator        nobody is waited for
    SingleProcess      replicas of one process wait for each other
    Workers            workers wait for each other, and carry on together after an error
    BoundedStaleness   workers update servers on their own, none too far ahead (`session.on_servers.staleness_clock`)

A session or a function asks its own before and after each step, and about each error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.runtime.consensus.all_reduce_session import Array
from autograph_rewrite.runtime.consensus.divergence import Account, difference, disagreement
from autograph_rewrite.runtime.consensus.failed_steps import FailedSteps
from autograph_rewrite.runtime.consensus.step_digest import agree
from autograph_rewrite.runtime.failures.failure_messages import is_of_the_job, missing
from autograph_rewrite.runtime.failures.liveness import listed
from autograph_rewrite.runtime.failures.watchdog import Watchdog


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

        Args:
            updates: the step writes variables.

        Raises:
            ClusterError: somebody is missing, or does something else.
        """

    def after_step(self, *, updates: bool = True) -> None:
        """Note that a step is done.

        Args:
            updates: it has written variables.
        """

    def step_failed(self, error: Exception | None = None) -> None:
        """Note that a step has failed: nobody knows what each worker had updated.

        Args:
            error: of TensorFlow's, by which it has; None: not by one.
        """

    def end(self, problem: ClusterError) -> None:
        """Let every later run raise an error."""

    def failure(self, error: Exception, what: str, account: Account | None) -> Exception | None:
        """Return what an error of TensorFlow means; None for one of the program's own computation.

        Args:
            error: of a run.
            what: the run was to do, for messages.
            account: what this worker tells of it; None: nothing.
        """
        return None

    def require_equal(self, account: Account, table: Array) -> None:
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

    def failure(self, error: Exception, what: str, account: Account | None) -> ClusterError | None:
        """Return what a failure of a collective means; None for an error of the program's own computation.

        Args:
            error: of a run.
            what: the run was to do, for messages.
            account: what this worker tells of it; None: nothing.
        """
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
        member: this process.
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
        """Note that a step has failed, and tell the others: all have to agree before the next.

        Args:
            error: of TensorFlow's, by which it has; None: not by one.
        """
        if not self._failed and self._told is not None:
            self._told.tell(error)
        self._failed = True

    def end(self, problem: ClusterError) -> None:
        """Let every later run raise an error."""
        self._problem = problem

    def failure(self, error: Exception, what: str, account: Account | None) -> Exception | None:
        """Return who is missing, or what has failed on another worker, or what the workers do differently.

        None for an error of the program's own.

        Args:
            error: of a run.
            what: the run was to do, for messages.
            account: what this worker tells of it; None: nothing.
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

    def require_equal(self, account: Account, table: Array) -> None:
        """Compare what the workers were given in a step."""
        if not agree(table):
            problem = disagreement(self._member, account, self.watchdog.seconds, table[:, 1:])
            self.step_failed(problem)
            raise problem

    def close(self) -> None:
        """Hold nobody up any more: others see that this process ends."""
