"""Run a parameter-server process: TensorFlow's server, which serves workers until all of them have ended.

ps 0   ar.distribute(...)      does not return: it serves, and then ends the program with exit code 0

A server that is asked to end lets its workers end first (`Leaving`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

from autograph_rewrite.cluster.membership import Membership, in_job
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan import selected
from autograph_rewrite.plan.selected import chosen_config
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job import exchanges
from autograph_rewrite.runtime.job.liveness import PATIENCE, Presence, listed, name_of
from autograph_rewrite.runtime.job.say import say
from autograph_rewrite.runtime.job.signals import grace, listen, name_of_signal
from autograph_rewrite.runtime.job.stop import FLAG, of_grace
from autograph_rewrite.runtime.job.tf_server import PortGuard, open_to_all, require_free

LOOK = 1.0
"""Seconds between two looks at the workers."""
LATEST = 600.0
"""Seconds within which the first worker must have started."""


def serve_if_server(member: Membership | None, seconds: float) -> None:
    """Serve, and never return, if this process is a parameter server; else return at once.

    Every function by which a process joins its job calls this first, so a server runs the workers' program up to there.
    """
    if member is not None and not member.is_worker:
        serve(member, seconds)


def take_part(config: ConfigLike | None) -> tuple[Config, Membership | None]:
    """Return the configuration with the processes of the job, and this process's membership; a server serves here.

    Raises:
        ConfigError: nothing says which process this is.
    """
    given, member = in_job(chosen_config(config))
    serve_if_server(member, given.timeout_seconds)
    return given, member


def serve(member: Membership, seconds: float) -> NoReturn:
    """Serve the workers of a job; end the program once they have ended.

    Args:
        seconds: how long all running workers may stay silent.

    Raises:
        ClusterError: this process's port is taken, no worker ever started, or none answers any more.
        SystemExit: the workers have ended.
    """
    selected.answered()
    tf = tensorflow()
    require_free(member)
    guard = PortGuard(member.address)
    try:
        server = tf.distribute.Server(member.cluster, job_name="ps", task_index=member.task)
    except tf.errors.OpError as error:
        problem = f"{member.name} cannot serve at {member.address}: {str(error).splitlines()[0]}"
        raise ClusterError(problem, hint="is it running already? Each process needs a port of its own") from None
    if not guard.release():
        warnings.warn(open_to_all(member), stacklevel=1)
    print(f"{member.name} serves {len(member.workers)} workers at {member.address}", file=sys.stderr, flush=True)
    leaving = Leaving(member, server.target)
    began, presence, seen = time.monotonic(), Presence(member.workers), set[str]()
    while True:
        there = presence.there(leaving.patience)
        seen |= there
        leaving.look(there)
        if seen and not there and not presence.there():
            raise SystemExit(0)
        silent = time.monotonic() - presence.answered
        if there and silent > max(seconds, LOOK):
            names = listed(name_of("worker", task, a) for task, a in enumerate(member.workers) if a in there)
            problem = f"{member.name} has waited {silent:.0f} s for {names}: no answer"
            raise ClusterError(problem, hint="are they stopped? Look at what they printed last; start the job again")
        if not seen and time.monotonic() - began > LATEST:
            problem = f"{member.name} has served for {LATEST:.0f} s, and no worker came: {listed(member.workers)}"
            raise ClusterError(problem, hint="look at what the workers printed last")
        leaving.wait(LOOK)


# A server that is asked to end tells its workers, and serves them until they have ended or the grace time is over.
#
# ps 0       SIGTERM ─► tells all workers ────────── serves, also what they save ────────── ends by the signal
# workers               all end behind the same step, as if they had been asked themselves ─┘


_LOOK = 0.1
"""Seconds from one look at the workers to the next, once the server is asked to end."""


class Leaving:
    """Ends a server that a signal asks to end, once its workers have ended or the grace time is over."""

    def __init__(self, member: Membership, target: str) -> None:
        self._member, self._target = member, target
        self._asked, self._ends = threading.Event(), 0.0
        self._number, self._is_told = 0, False
        listen(self._note)

    def _note(self, number: int) -> None:
        if not self._asked.is_set():
            self._number, self._ends = number, time.monotonic() + of_grace(grace())
            self._asked.set()

    @property
    def patience(self) -> float:
        """Seconds to wait for an answer of the workers."""
        left = self._ends - time.monotonic() if self._asked.is_set() else PATIENCE
        return min(PATIENCE, max(_LOOK, left))

    def wait(self, seconds: float) -> None:
        """Wait between two looks at the workers; for a shorter time once a signal asks this process to end."""
        if self._asked.is_set():
            time.sleep(_LOOK)
        else:
            self._asked.wait(seconds)

    def look(self, there: Collection[str]) -> None:
        """End if a signal has asked for it, and no worker is left or time is up."""
        if not self._asked.is_set():
            return
        names = listed(name_of("worker", task, a) for task, a in enumerate(self._member.workers) if a in there)
        signalled, left = name_of_signal(self._number), self._ends - time.monotonic()
        if not there:
            self._end()
        if left <= 0:
            say(f"{self._member.name} ends, as {signalled} asks for, by force: {names} has not ended before it")
            self._end()
        if not self._is_told:
            self._is_told = True
            say(
                f"{self._member.name} is asked to end by {signalled}, and tells its workers; it serves {names} until "
                f"they have ended, for {left:.0f} s at most"
            )
            threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        """Let all workers end together, as if a signal had asked one of them."""
        with suppress(tensorflow().errors.OpError):  # they have ended, or do not answer
            exchanges.put(self._member, FLAG, range(len(self._member.workers)), self._target)

    def _end(self) -> None:
        """End by the signal, with its default handler."""
        signal.signal(self._number, signal.SIG_DFL)
        os.kill(os.getpid(), self._number)
