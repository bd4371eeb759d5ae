"""What one worker has found, handed to all others: messages through queues that live on those who take them.

    worker 0   run ──► values ──► queue @ worker 1, queue @ worker 2, ...
    worker 1   takes from its own queue: it waits there for nobody else

A message is a list of texts, of any length. Worker 0 is never more than one ahead of who takes them. Queues are in a
session of their own, and no collective is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.plan.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime import cluster
from autograph_rewrite.runtime.peers import name_of

PIECE = 2**29
"""Bytes of one message, about: TensorFlow sends no tensor of two gigabytes."""
_END, _MORE = b"end", b"more"
_LAST = 5_000
"""Milliseconds that a program which ends waits to hear that worker 0 does not need it any more."""


class Relay:
    """The queues of one session. Worker 0 sends, all others take.

    Args:
        member: this process.
        name: what all workers call these queues, and nobody else's.
    """

    def __init__(self, member: Membership, name: str) -> None:
        tf = tensorflow()
        raw, graph = tf.raw_ops, tf.Graph()
        hosts = [f"/job:worker/replica:0/task:{task}" for task in range(len(member.workers))]
        takers = range(1, len(hosts)) if member.is_chief else [member.task]
        self._names = {f"to_{task}": name_of("worker", task, member.workers[task]) for task in takers}
        with graph.as_default():
            self._message = tf.compat.v1.placeholder(tf.string, [None])
            puts, takes, leaves = [], [], []
            for task in takers:
                with tf.device(f"{hosts[task]}/device:CPU:0"):
                    queue = raw.FIFOQueueV2(
                        component_types=[tf.string], capacity=1, container=name, shared_name=f"for_{task}"
                    )
                    puts.append(raw.QueueEnqueueV2(handle=queue, components=[self._message], name=f"to_{task}"))
                    takes += raw.QueueDequeueV2(handle=queue, component_types=[tf.string])
                    leaves.append(raw.QueueCloseV2(handle=queue, cancel_pending_enqueues=True))
            self._put, self._take, self._leave = tf.group(puts), takes[0], leaves[0]
        config = tf.compat.v1.ConfigProto()
        cluster.configure(config, member, [f"{hosts[task]}/device:CPU:0" for task in takers])
        self.session = tf.compat.v1.Session(cluster.target(member), graph=graph, config=config)
        last = tf.compat.v1.RunOptions(timeout_in_ms=_LAST)
        self._last: list[tuple[Any, Any, Any]]
        if member.is_chief:
            self._last = [(self._put, {self._message: [_END]}, last)]
        else:  # who leaves before worker 0 has ended tells it so
            self._last = [(self._take, None, last), (self._leave, None, last)]

    def end(self) -> None:
        """Let nobody leave before worker 0 is done with it; where nobody can be told any more, nobody waits."""
        for fetch, feeds, options in self._last:
            with suppress(Exception):
                self.session.run(fetch, feeds, options)
        abandon(self.session)

    def leave(self) -> None:
        """Take no more part in it, without waiting for anybody."""
        with suppress(Exception):
            self.session.run(self._leave)
        abandon(self.session)

    def send(self, texts: Sequence[bytes]) -> None:
        """Hand a message to all other workers.

        Raises:
            EOFError: one of them has closed its session; it says which.
        """
        tf = tensorflow()
        for piece, is_last in _pieces(texts):
            parts = np.array([b"" if is_last else _MORE, *piece], object)
            try:
                self.session.run(self._put, {self._message: parts})
            except tf.errors.CancelledError as error:
                name = self._names.get(getattr(error.op, "name", ""))
                if name is None:
                    raise
                raise EOFError(name) from error

    def take(self, options: Any = None) -> list[bytes]:
        """Wait for a message.

        Args:
            options: a RunOptions.

        Raises:
            EOFError: worker 0 has closed its session; it says so.
        """
        texts: list[bytes] = []
        while True:
            kind, *piece = self.session.run(self._take, options=options)
            if kind == _END:
                raise EOFError("worker 0")
            texts += piece
            if kind != _MORE:
                return texts


def _pieces(texts: Sequence[bytes]) -> Iterator[tuple[Sequence[bytes], bool]]:
    """Yield the texts in pieces that can be sent at once, and whether each is the last one."""
    begin, size = 0, 0
    for at, text in enumerate(texts):
        if size and size + len(text) > PIECE:
            yield texts[begin:at], False
            begin, size = at, 0
        size += len(text)
    yield texts[begin:], True


def abandon(session: Any) -> None:
    """Leave a session as it is until the process ends: to close it would wait for who is not there."""
    session._closed, session._session = True, None
