"""An all-reduce between workers outside of any step, in a separate session; names workers that do not join.

It works before the first step in every mode, and its failure does not spoil the collectives of the steps.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.broadcast_queue import abandon
from autograph_rewrite.runtime.failures.failure_messages import missing
from autograph_rewrite.runtime.failures.liveness import PeerMonitor
from autograph_rewrite.runtime.failures.watchdog import Closing, Watchdog
from autograph_rewrite.runtime.job import tf_server

Array = np.ndarray[Any, Any]


class Exchange:
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

    def __enter__(self) -> Exchange:
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
