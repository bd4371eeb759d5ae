"""Flags on the devices of workers: queues that any worker of the job can put something into, and look at.

    worker 0   put([1])  ──► queue @ worker 1            worker 1   counts([1]) ──► 1

They are in a session of their own, need no collective, and nobody waits for anybody but for the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.broadcast_queue import abandon
from autograph_rewrite.runtime.job import tf_server

_PATIENCE = 3_000
"""Milliseconds to wait for an answer."""


class Flags:
    """The flags of one name on some workers. Close them.

    Args:
        member: this process.
        name: what all workers call them, and no others.
        tasks: the workers on whose devices they are.
        target: of the session, in a server; "": of this worker.
    """

    def __init__(self, member: Membership, name: str, tasks: Sequence[int], target: str = "") -> None:
        tf = tensorflow()
        raw, graph = tf.raw_ops, tf.Graph()
        hosts = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in tasks]
        self._puts, self._sizes = [], []
        with graph.as_default():
            for host in hosts:
                with tf.device(host):
                    queue = raw.FIFOQueueV2(
                        component_types=[tf.int32], container=f"autograph.{name}", shared_name="flag"
                    )
                    self._puts.append(raw.QueueEnqueueV2(handle=queue, components=[tf.constant(1)]))
                    self._sizes.append(raw.QueueSizeV2(handle=queue))
        config = tf.compat.v1.ConfigProto()
        tf_server.configure(config, member, hosts)
        self._options = tf.compat.v1.RunOptions(timeout_in_ms=_PATIENCE)
        self._session = tf.compat.v1.Session(target or tf_server.target(member), graph=graph, config=config)

    def put(self) -> None:
        """Put one more into each.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        self._run(self._puts)

    def counts(self) -> list[int]:
        """Return how many were put into each.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        return [int(count) for count in self._run(self._sizes)]

    def _run(self, fetches: list[object]) -> Sequence[int]:
        try:
            found: Sequence[int] = self._session.run(fetches, options=self._options)
        except tensorflow().errors.OpError:
            abandon(self._session)  # to close it would wait for who does not answer
            raise
        return found

    def close(self) -> None:
        """Release the session."""
        with suppress(Exception):
            self._session.close()


def put(member: Membership, name: str, tasks: Sequence[int], target: str = "") -> None:
    """Put one more into the flags of a name on some workers.

    Args:
        member: this process.
        name: of the flags.
        tasks: of the workers.
        target: of the session, in a server; "": of this worker.

    Raises:
        tf.errors.OpError: somebody does not answer.
    """
    flags = Flags(member, name, tasks, target)
    flags.put()
    flags.close()


def counts(member: Membership, name: str, tasks: Sequence[int]) -> list[int]:
    """Return how many were put into the flags of a name on some workers.

    Args:
        member: this process.
        name: of the flags.
        tasks: of the workers.

    Raises:
        tf.errors.OpError: somebody does not answer.
    """
    flags = Flags(member, name, tasks)
    found = flags.counts()
    flags.close()
    return found
