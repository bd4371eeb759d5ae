"""What a failure of TensorFlow means in a job: whether another process is behind it, and which."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.devices import process_of
from autograph_rewrite.plan.membership import Membership
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime import peers

_ASK = 0.2
"""Seconds between two looks for somebody who is still starting."""
_OF_THE_JOB = ("DeadlineExceededError", "CancelledError", "UnavailableError", "AbortedError", "InternalError")
_SIGNS = (
    "Collective ops is aborted",
    "RingReduce",
    "RingGather",
    "Connection reset",
    "Socket closed",
    "worker/replica",
)
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
"""How TensorFlow names the op that failed: of a step, the collective that was waited for."""


def is_of_the_job(error: Exception) -> bool:
    """Return whether a failure of TensorFlow may come from another process, not from the user's own computation."""
    kind, text = type(error).__name__, str(getattr(error, "message", error))
    return kind in _OF_THE_JOB[:4] or (kind == "InternalError" and any(sign in text for sign in _SIGNS))


def missing(
    member: Membership, what: str, seconds: float, error: Exception | None = None, lost: Sequence[str] = ()
) -> ClusterError:
    """Return the error of a worker that waited in vain, with the names of those who do not answer.

    Args:
        member: this process.
        what: what it waited for the others to do.
        seconds: how long it is patient.
        error: TensorFlow's.
        lost: who was missed already.
    """
    quiet = lost or peers.silent(member)
    node = _NODE.search(str(getattr(error, "message", "")))
    where = node.group(1) if node is not None else None
    if quiet:
        problem = f"{member.name} waited for {peers.listed(quiet)} to {what}: no answer"
        hint = "look at what it printed last; start the job again once it can run"
        return ClusterError(problem, where=where, hint=hint)
    if error is not None and type(error).__name__ not in ("DeadlineExceededError", "CancelledError"):
        told = str(getattr(error, "message", error)).strip().splitlines()
        problem = f"{member.name} failed to {what}: {told[0][:300] if told else type(error).__name__}"
        return ClusterError(problem, where=where)
    return ClusterError(
        f"{member.name} waited {seconds:g} s for the other workers to {what}; all processes answer",
        where=where,
        hint="do all workers run the same program, fetch the same values, and have equally many batches? If one of "
        "them is only slower, raise timeout_seconds",
    )


def require_there(member: Membership, plan: Plan) -> None:
    """Wait for the processes whose devices hold variables: a session would wait for them without end.

    Raises:
        ClusterError: one of them is not there in time.
    """
    wanted = {process_of(home) for home in plan.homes.values()} - {""}
    tasks = {
        f"/job:{job}/replica:0/task:{task}": (address, peers.name_of(job, task, address))
        for job, addresses in member.cluster.items()
        for task, address in enumerate(addresses)
    }
    others = dict(tasks[process] for process in wanted if process in tasks)
    others.pop(member.address, None)
    deadline = time.monotonic() + plan.timeout_seconds
    presence = peers.Presence(others)
    while absent := others.keys() - presence.there():
        if time.monotonic() > deadline:
            names = peers.listed(sorted(others[address] for address in absent))
            problem = f"{member.name} waited {plan.timeout_seconds:g} s for {names}, which hold variables: no answer"
            raise ClusterError(problem, hint="start the parameter servers, too: the same program, as TF_CONFIG's ps")
        time.sleep(_ASK)
