"""Rendezvous: small exchanges between the workers outside of any step, each of which names who is missing.

    compare what all are about to run  ──  adopt the chief's variables  ──  agree on a seed

They run in a session of their own, so that they work before the first step in every mode, and a failure does not spoil
the collectives of the steps.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.devices import process_of
from autograph_rewrite.plan.membership import Membership
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime import cluster, peers
from autograph_rewrite.runtime.peers import Lookout
from autograph_rewrite.runtime.watchdog import Closing, Watchdog

Array = np.ndarray[Any, Any]
FIRST_KEY = 2**29
"""Group and instance keys of rendezvous; those of steps are spread over all numbers below 2^30 and above."""

_ASK = 0.2
"""Seconds between two looks for somebody who is still starting."""
PIECE = 2**24
"""How many numbers travel at once: a message of gRPC cannot hold two gigabytes."""


class Rendezvous:
    """Exchanges of one job. All workers must make the same ones in the same order.

    Args:
        member: this process.
        seconds: how long to wait for the others.
    """

    def __init__(self, member: Membership, seconds: float) -> None:
        self._tf = tensorflow()
        self._member = member
        self._seconds = seconds

    def add_up(self, value: Array, what: str) -> Array:
        """Return the sum of the workers' arrays, of equal shape; int32, int64, float32 or float64.

        Args:
            value: this worker's.
            what: what it is for, for messages.

        Raises:
            ClusterError: somebody is missing.
        """
        return self._exchange("CollectiveReduceV2", value, what, merge_op="Add", final_op="Id")

    def rows(self, value: Array, what: str) -> Array:
        """Return the workers' arrays, of equal shape, stacked in their order."""
        mine = np.zeros((len(self._member.workers), *value.shape), value.dtype)
        mine[self._member.task] = value
        return self.add_up(mine, what)

    def texts(self, text: str, what: str) -> list[str]:
        """Return the texts of all workers."""
        data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        longest = int(self.rows(np.array(data.size, np.int32), what).max())
        padded = np.zeros(longest + 1, np.int32)
        padded[: data.size] = data
        padded[-1] = data.size
        return [bytes(row[: row[-1]].astype(np.uint8)).decode() for row in self.rows(padded, what)]

    def of_chief(self, values: Sequence[Array], what: str) -> list[Array]:
        """Return the arrays that worker 0 has; all workers give arrays of the same types and shapes."""
        result: list[Array] = [np.asarray(value) for value in values]
        by_type: dict[np.dtype[Any], list[int]] = {}
        for position, value in enumerate(result):
            if value.size and value.dtype != object:
                by_type.setdefault(value.dtype, []).append(position)
        for positions in by_type.values():
            flat = np.concatenate([result[i].reshape(-1) for i in positions])
            words = flat.view(np.uint8)
            words = np.pad(words, (0, -words.size % 4)).view(np.int32)  # bits travel unchanged as integers
            chosen = words if self._member.is_chief else np.zeros_like(words)
            pieces = [self.add_up(chosen[i : i + PIECE], what) for i in range(0, chosen.size, PIECE)]
            shared = np.concatenate(pieces).view(np.uint8)[: flat.nbytes].view(flat.dtype)
            at = 0
            for i in positions:
                size = result[i].size
                result[i] = shared[at : at + size].reshape(result[i].shape)
                at += size
        return result

    def _exchange(self, op: str, value: Array, what: str, **attrs: Any) -> Array:
        tf, v1 = self._tf, self._tf.compat.v1
        number = cluster.next_exchange()
        graph = tf.Graph()
        with graph.as_default(), tf.device(f"/job:worker/replica:0/task:{self._member.task}/device:CPU:0"):
            given = v1.placeholder(value.dtype, value.shape)
            sent = tf.reshape(given, [-1])
            got = getattr(tf.raw_ops, op)(
                input=sent,
                group_size=len(self._member.workers),
                group_key=FIRST_KEY,
                instance_key=FIRST_KEY + number,
                ordering_token=[],
                communication_hint="auto",
                timeout_seconds=0.0,
                **attrs,
            )
            got = tf.reshape(got, value.shape)
        config = v1.ConfigProto()
        cluster.configure(config, self._member)
        options = v1.RunOptions(timeout_in_ms=int(self._seconds * 1e3))
        lookout = functools.partial(Lookout, self._member, self._seconds)
        with v1.Session(cluster.target(self._member), graph=graph, config=config) as session:
            watchdog = Watchdog(
                self._seconds,
                lookout if number > 1 else None,  # who is not there at the first one may not have started yet
                functools.partial(Closing, session),
                may_idle=True,
            )
            watchdog.start()
            try:
                result: Array = session.run(got, {given: value}, options=options)
            except tf.errors.OpError as error:
                raise missing(self._member, what, self._seconds, error, watchdog.lost) from error
            finally:
                watchdog.stop()
        return result


def require_there(member: Membership, plan: Plan) -> None:
    """Wait for the processes whose devices hold variables: a session would wait for them without end.

    Raises:
        ClusterError: one of them is not there in time.
    """
    wanted = {process_of(home) for home in plan.homes.values()} - {""}
    tasks = {f"/job:{job}/replica:0/task:{i}": a for job, found in member.cluster.items() for i, a in enumerate(found)}
    addresses = {tasks[process]: process for process in wanted if tasks.get(process, member.address) != member.address}
    deadline = time.monotonic() + plan.timeout_seconds
    presence = peers.Presence(addresses)
    while absent := sorted(addresses.keys() - presence.there()):
        if time.monotonic() > deadline:
            names = peers.listed(f"{addresses[address].removeprefix('/job:')} ({address})" for address in absent)
            problem = f"{member.name} waited {plan.timeout_seconds:g} s for {names}, which hold variables: no answer"
            raise ClusterError(problem, hint="start the parameter servers, too: the same program, as TF_CONFIG's ps")
        time.sleep(_ASK)


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
