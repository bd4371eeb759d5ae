"""Map errors of TensorFlow to failures of peers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.runtime.failures import liveness

_OF_THE_JOB = ("DeadlineExceededError", "CancelledError", "UnavailableError", "AbortedError", "InternalError")
_SIGNS = (
    "Collective ops is aborted",
    "RingReduce",
    "RingGather",
    "Connection reset",
    "Socket closed",
    "worker/replica",
)
_REFUSED = "Restart your program to reset"
"""What TensorFlow says of every collective once the parts of one have not all ended by the step's own failure."""
_ENDED_BY_ANOTHER = ("InternalError", "UnavailableError", "AbortedError")
_ENDS, _GLANCE = 3.0, 0.1
"""Seconds that a worker may still answer while it ends, because its step has failed there; and between two looks."""

_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
"""How TensorFlow names the op that failed: of a step, the collective that was waited for."""


def is_of_the_job(error: Exception) -> bool:
    """Return whether a failure of TensorFlow may come from another process, not from the user's own computation."""
    kind, text = type(error).__name__, str(getattr(error, "message", error))
    return kind in _OF_THE_JOB[:4] or (kind == "InternalError" and any(sign in text for sign in _SIGNS))


def missing(
    member: Membership,
    what: str,
    seconds: float,
    error: Exception | None = None,
    lost: Sequence[str] = (),
    differs: Callable[[], ClusterError | None] | None = None,
) -> ClusterError:
    """Return the error of a worker that waited in vain, with the names of those who do not answer.

    Args:
        member: this process.
        what: what it waited for the others to do.
        seconds: how long it is patient.
        error: TensorFlow's.
        lost: who was missed already.
        differs: finds out what the workers do differently, if all of them are there.
    """
    quiet = lost or _silent(member, error)
    node = _NODE.search(str(getattr(error, "message", "")))
    where = node.group(1) if node is not None else None
    if quiet:
        problem = f"{member.name} waited for {liveness.listed(quiet)} to {what}: no answer"
        hint = "look at what it printed last; start the job again once it can run"
        found = ClusterError(problem, where=where, hint=hint)
        found.lost = liveness.workers_in(quiet)
        return found
    text = str(getattr(error, "message", error))
    if _REFUSED in text:
        return ClusterError(
            f"{member.name} failed to {what}: TensorFlow refuses all collectives once one was broken off",
            where=where,
            hint="start the job again; `launch --elastic` does that by itself",
        )
    difference = differs() if differs is not None else None
    if difference is not None:
        return difference
    if error is not None and type(error).__name__ not in ("DeadlineExceededError", "CancelledError"):
        lines = text.strip().splitlines()
        problem = f"{member.name} failed to {what}: {lines[0][:300] if lines else type(error).__name__}"
        return ClusterError(problem, where=where)
    return ClusterError(
        f"{member.name} waited {seconds:g} s for the other workers to {what}; all processes answer",
        where=where,
        hint="do all workers run the same program, fetch the same values, and have equally many batches? If one of "
        "them is only slower, raise timeout_seconds",
    )


def _silent(member: Membership, error: Exception | None) -> list[str]:
    """Return who does not answer; if another has ended a collective, it is given time to end."""
    ends = time.monotonic() + (_ENDS if type(error).__name__ in _ENDED_BY_ANOTHER else 0.0)
    while not (quiet := liveness.silent(member)) and time.monotonic() < ends:
        time.sleep(_GLANCE)
    return quiet
