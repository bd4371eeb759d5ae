"""Rendezvous: small exchanges between workers outside of any step, with timeouts that name missing workers.

    compare what all are about to run  ──  adopt the chief's variables  ──  agree on a seed

They run in a session of their own, so that they work before the first step in every mode, and a failure does not spoil
the collectives of the steps.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job import tf_server
from autograph_rewrite.runtime.job.channel import abandon
from autograph_rewrite.runtime.job.liveness import PeerMonitor, missing
from autograph_rewrite.runtime.job.watchdog import Closing, Watchdog

FIRST_KEY = 2**29
"""Group and instance keys of rendezvous; those of steps are spread over all numbers below 2^30 and above."""

PIECE = 2**24
"""How many numbers travel at once: a message of gRPC cannot hold two gigabytes."""


class Rendezvous:
    """Exchanges of one job. All workers must make the same ones in the same order.

    Args:
        member: this process.
        seconds: how long to wait for the others.
    """

    def __init__(self, member: Membership, seconds: float) -> None:
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
        key = FIRST_KEY + tf_server.next_exchange()
        with RepeatedSum(self._member, self._seconds, value, FIRST_KEY, key) as exchange:
            return exchange.add_up(value, what)

    def meet(self, what: str) -> None:
        """Wait until all workers are here.

        Args:
            what: what it is for, for messages.

        Raises:
            ClusterError: somebody is missing.
        """
        self.add_up(np.zeros((), np.int32), what)

    def rows(self, value: Array, what: str) -> Array:
        """Return the workers' arrays, of equal shape, stacked in their order."""
        mine = np.zeros((len(self._member.workers), *value.shape), value.dtype)
        mine[self._member.task] = value
        return self.add_up(mine, what)

    def texts(self, text: str, what: str) -> list[str]:
        """Return the texts of all workers."""
        return [data.decode() for data in self.contents(text.encode(), what)]

    def contents(self, data: bytes, what: str) -> list[bytes]:
        """Return what all workers give, of any length."""
        sizes = self.rows(np.array(len(data), np.int64), what)
        words = np.zeros((int(sizes.max()) + 3) // 4, np.int32)
        words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        pieces = [self.rows(words[i : i + PIECE], what) for i in range(0, words.size, PIECE)]
        rows = np.concatenate(pieces, axis=1) if pieces else np.zeros((len(sizes), 0), np.int32)
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def rounds(self, count: int, what: str) -> list[tuple[int, int]]:
        """Meet so many times; return when each began and ended, in nanoseconds by the clock of this process."""
        key = FIRST_KEY + tf_server.next_exchange()
        mine, found = np.zeros((), np.int32), []
        with RepeatedSum(self._member, self._seconds, mine, FIRST_KEY, key) as exchange:
            exchange.add_up(mine, what)  # the first one waits for connections, and for who comes late
            for _ in range(count):
                begin = time.time_ns()
                exchange.add_up(mine, what)
                found.append((begin, time.time_ns()))
        return found

    def of_chief(self, values: Sequence[Array], what: str) -> list[Array]:
        """Return the arrays that worker 0 has; all workers give arrays of the same types and shapes."""
        result: list[Array] = [np.asarray(value) for value in values]
        words_of = [i for i, value in enumerate(result) if value.size and value.dtype == object]
        if words_of:
            said = [[word.decode("latin-1") for word in result[i].ravel()] for i in words_of]
            for i, words in zip(words_of, json.loads(self.texts(json.dumps(said), what)[0]), strict=True):
                result[i] = np.array([word.encode("latin-1") for word in words], object).reshape(result[i].shape)
        by_type: dict[np.dtype[Any], list[int]] = {}
        for position, value in enumerate(result):
            if value.size and value.dtype != object:
                by_type.setdefault(value.dtype, []).append(position)
        for positions in by_type.values():
            flat = np.concatenate([result[i].reshape(-1) for i in positions])
            bits = flat.view(np.uint8)
            bits = np.pad(bits, (0, -bits.size % 4)).view(np.int32)  # they travel unchanged as integers
            chosen = bits if self._member.is_chief else np.zeros_like(bits)
            pieces = [self.add_up(chosen[i : i + PIECE], what) for i in range(0, chosen.size, PIECE)]
            shared = np.concatenate(pieces).view(np.uint8)[: flat.nbytes].view(flat.dtype)
            at = 0
            for i in positions:
                size = result[i].size
                result[i] = shared[at : at + size].reshape(result[i].shape)
                at += size
        return result


# An all-reduce between workers outside of any step, in a separate session; names workers that do not join.
#
# It works before the first step in every mode, and its failure does not spoil the collectives of the steps.

Array = np.ndarray[Any, Any]


class RepeatedSum:
    """A sum that can be asked for again and again. Use it as a context manager, or close it.

    Args:
        member: this process.
        seconds: how long to wait for the others.
        like: an array of the shape and type of what is added up; int32, int64, float32 or float64.
        group: the group key.
        key: the instance key, which no other exchange of the group has.
        tells: whether to say that it stands still.
    """

    def __init__(
        self, member: Membership, seconds: float, like: Array, group: int, key: int, *, tells: bool = True
    ) -> None:
        tf = self._tf = tensorflow()
        self._member = member
        self._seconds = seconds
        self._group, self._key = group, key
        graph = tf.Graph()
        with graph.as_default(), tf.device(f"/job:worker/replica:0/task:{member.task}/device:CPU:0"):
            self._given = tf.compat.v1.placeholder(like.dtype, like.shape)
            total = tf.raw_ops.CollectiveReduceV2(
                input=tf.reshape(self._given, [-1]),
                group_size=len(member.workers),
                group_key=group,
                instance_key=key,
                ordering_token=[],
                communication_hint="auto",
                timeout_seconds=0.0,
                merge_op="Add",
                final_op="Id",
            )
            self._total = tf.reshape(total, like.shape)
        config = tf.compat.v1.ConfigProto()
        tf_server.configure(config, member)
        self._session = tf.compat.v1.Session(tf_server.target(member), graph=graph, config=config)
        lookout = functools.partial(PeerMonitor, member, seconds)
        closing = functools.partial(Closing, self._session)
        self._watchdog = Watchdog(seconds, lookout, closing, may_idle=True)
        self._watchdog.tells = tells
        self._has_met = False

    def __enter__(self) -> RepeatedSum:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the session."""
        self._session.close()

    def add_up(self, value: Array, what: str) -> Array:
        """Return the sum of the workers' arrays.

        Args:
            value: this worker's.
            what: what it is for, for messages.

        Raises:
            ClusterError: somebody is missing.
        """
        if not self._has_met:
            tf_server.meet(self._member, self._seconds, what)
            self._has_met = True
        options = self._tf.compat.v1.RunOptions(timeout_in_ms=int(self._seconds * 1e3))
        options.experimental.collective_graph_key = self._group
        session, feeds = self._session, {self._given: value}
        self._watchdog.doing = f"an exchange to {what} (key {self._key})"
        try:
            result: Array = self._watchdog.run(lambda: session.run(self._total, feeds, options=options))
        except self._tf.errors.OpError as error:
            if self._watchdog.expired:
                abandon(session)
            raise missing(self._member, what, self._seconds, error, self._watchdog.lost) from error
        return result


# Means over all replicas of what each has of its variables, outside of any step (`local_sgd`).
#
# replica 0: w = 1, replica 1: w = 3      ─► 2 in this process, which all others do likewise ─► 2 in each copy

GROUP, KEY = 2**29 - 2, 1
"""Of the exchange between workers."""


def replica_means(rows: Sequence[Sequence[Array]], member: Membership | None, seconds: float) -> list[Array]:
    """Return the mean of each variable over the replicas of all workers, who call it together.

    Args:
        rows: of each variable, the values that the replicas of this process have.
        member: this process; None where there is one.
        seconds: how long to wait for the others.

    Raises:
        ClusterError: somebody is missing.
    """
    wide = [np.sum([np.asarray(value, _wide(value)) for value in row], 0) for row in rows]
    count = len(rows[0]) if rows else 1
    if member is not None and rows:
        wide = _added_up(wide, member, seconds)
        count *= len(member.workers)
    return [np.asarray(total / count, np.asarray(row[0]).dtype) for total, row in zip(wide, rows, strict=True)]


def _wide(value: Array) -> type:
    return np.complex128 if np.iscomplexobj(value) else np.float64


def _added_up(totals: Sequence[Array], member: Membership, seconds: float) -> list[Array]:
    flat = [np.ascontiguousarray(total).reshape(-1).view(np.float64) for total in totals]
    joined = np.concatenate(flat)
    with RepeatedSum(member, seconds, joined, GROUP, KEY + joined.size % 2**20) as exchange:
        joined = exchange.add_up(joined, "average the variables of all replicas")
    ends = np.cumsum([part.size for part in flat])[:-1]
    parts = np.split(joined, ends)
    return [part.view(total.dtype).reshape(total.shape) for part, total in zip(parts, totals, strict=True)]
