"""Compare the workers' inputs while the step runs: digests are exchanged in a background thread.

    the program   step ────────────────────────────► its results, or an error on all workers
    a thread      digest of all of it ──► exchange ──┘

For what is too much to be digested before the step, and for workers that run nothing themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange
from autograph_rewrite.runtime.consensus.divergence import Account, disagreement
from autograph_rewrite.runtime.consensus.rendezvous import FIRST_KEY
from autograph_rewrite.runtime.consensus.step_digest import digest_of
from autograph_rewrite.runtime.job import tf_server


class Beside:
    """Compares one series of steps; all workers make the same ones.

    Args:
        member: this process.
        seconds: how long to wait for the others.
    """

    def __init__(self, member: Membership, seconds: float) -> None:
        self._member, self._seconds = member, seconds
        self._channel = tf_server.next_channel()
        self._exchange: Exchange | None = None
        self._pool = ThreadPoolExecutor(1, "autograph_beside")
        self._pending: Future[tuple[Account, Array] | None] | None = None

    def start(self, account: Callable[[], Account]) -> None:
        """Begin to compare.

        Args:
            account: makes what this worker tells of the step; it is called in the thread.
        """
        self._pending = self._pool.submit(self._odd, account)

    def problem(self, *, failed: bool = False) -> ClusterError | None:
        """Return the error of the step that was started last, if the workers were not given the same.

        Args:
            failed: the step has failed, so that it is no matter if the others cannot be asked any more.

        Raises:
            ClusterError: somebody is missing.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            odd = pending.result()
        except ClusterError:
            if failed:
                return None
            raise
        return disagreement(self._member, odd[0], self._seconds, odd[1]) if odd is not None else None

    def _odd(self, account: Callable[[], Account]) -> tuple[Account, Array] | None:
        """Return the account and all digests if these differ."""
        told = account()
        table = np.zeros((len(self._member.workers), DIGEST), np.int32)
        if self._exchange is None:
            self._exchange = Exchange(self._member, self._seconds, table, FIRST_KEY + self._channel, FIRST_KEY)
        table[self._member.task] = digest_of({"": told.what, **told.given})
        table = self._exchange.add_up(table, f"finish {told.what}")
        return (told, table) if (table != table[0]).any() else None
