"""Flags on the devices of workers: lists of texts to which any worker of the job can add one, and that it can read.

    worker 0   put([1], "text")  ──► list @ worker 1            worker 1   counts([1]) ──► 1

They are in a session of their own, need no collective, and nobody waits for anybody but for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

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
        raw, v1, graph = tf.raw_ops, tf.compat.v1, tf.Graph()
        hosts = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in tasks]
        self._puts, self._sizes, self._texts = [], [], []
        one = {"container": f"autograph.{name}", "shared_name": "flag"}
        with graph.as_default():
            self._text, self._at = v1.placeholder(tf.string, []), v1.placeholder(tf.int32, [])
            for host in hosts:
                with tf.device(host):
                    self._puts.append(raw.Stage(values=[self._text], **one))
                    self._sizes.append(raw.StageSize(dtypes=[tf.string], **one))
                    self._texts.append(raw.StagePeek(index=self._at, dtypes=[tf.string], **one)[0])
        config = tf.compat.v1.ConfigProto()
        tf_server.configure(config, member, hosts)
        self._options = tf.compat.v1.RunOptions(timeout_in_ms=_PATIENCE)
        self._session = tf.compat.v1.Session(target or tf_server.target(member), graph=graph, config=config)

    def put(self, text: str = "") -> None:
        """Put one more into each.

        Args:
            text: what it says.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        self._run(self._puts, {self._text: text})

    def counts(self) -> list[int]:
        """Return how many were put into each.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        return [int(count) for count in self._run(self._sizes)]

    def texts(self, at: int) -> list[str]:
        """Return what was put into each.

        Args:
            at: how many came before; each has more than that.

        Raises:
            tf.errors.OpError: somebody does not answer.
        """
        return [bytes(text).decode() for text in self._run(self._texts, {self._at: at})]

    def _run(self, fetches: list[object], feeds: Mapping[object, object] | None = None) -> Sequence[Any]:
        try:
            found: Sequence[Any] = self._session.run(fetches, feeds, options=self._options)
        except tensorflow().errors.OpError:
            abandon(self._session)  # to close it would wait for who does not answer
            raise
        return found

    def close(self) -> None:
        """Release the session."""
        with suppress(Exception):
            self._session.close()


def put(member: Membership, name: str, tasks: Sequence[int], target: str = "", text: str = "") -> None:
    """Put one more into the flags of a name on some workers.

    Args:
        member: this process.
        target: of the session, in a server; "": of this worker.
        text: what it says.

    Raises:
        tf.errors.OpError: somebody does not answer.
    """
    flags = Flags(member, name, tasks, target)
    flags.put(text)
    flags.close()
