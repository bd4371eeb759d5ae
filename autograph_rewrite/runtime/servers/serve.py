"""A parameter-server process: TensorFlow's server, which serves workers until all of them have ended.

ps 0   ar.distribute(...)      does not return: it serves, and then ends the program with exit code 0

One that is asked to end lets its workers end first (`leaving`).
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import NoReturn

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan import selected
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.failures.liveness import Presence, listed, name_of
from autograph_rewrite.runtime.job.bind_address import Guard
from autograph_rewrite.runtime.job.tf_server import open_to_all, require_free
from autograph_rewrite.runtime.servers.leaving import Leaving

LOOK = 1.0
"""Seconds between two looks at the workers."""
LATEST = 600.0
"""Seconds within which the first worker must have started."""


def serve_if_server(member: Membership | None, seconds: float) -> None:
    """Serve where this process is a parameter server, as `serve` does; come back at once in any other.

    Whatever makes a process a part of its job begins with this, so that a server runs the workers' program up to there.

    Args:
        member: this process; None of one process alone.
        seconds: as for `serve`.
    """
    if member is not None and not member.is_worker:
        serve(member, seconds)


def serve(member: Membership, seconds: float) -> NoReturn:
    """Serve the workers of a job; end the program once they have ended.

    Args:
        member: this process.
        seconds: how long all workers that are there may stay silent.

    Raises:
        ClusterError: this process's port is taken, no worker ever came, or none answers any more.
        SystemExit: the workers have ended.
    """
    selected.answered()
    tf = tensorflow()
    require_free(member)
    guard = Guard(member.address)
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
