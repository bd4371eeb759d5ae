"""What crosses between workers outside of collectives: broadcasts through queues on the receivers, and flags.

    worker 0   run ──► values ──► queue @ worker 1, queue @ worker 2, ...
    worker 1   takes from its own queue: it waits there for nobody else

A message is a list of texts, of any length. Worker 0 is never more than one ahead of who takes them. Queues are in a
session of their own, and no collective is needed.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job import tf_server
from autograph_rewrite.runtime.job.liveness import all_answer, name_of

PIECE = 2**29
"""Bytes of one message, about: TensorFlow sends no tensor of two gigabytes."""
_END, _MORE = b"end", b"more"
_LAST = 5_000
"""Milliseconds that worker 0 takes to say that it has ended."""
_LOOK, _RARELY, _ASK, _TELL = 0.002, 0.1, 1.0, 10.0
"""Seconds between two looks for that word, at first and later, from one look at worker 0 to the next, and to say so."""


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
        self._member = member
        self._names = {f"to_{task}": name_of("worker", task, member.workers[task]) for task in takers}
        with graph.as_default():
            self._message = tf.compat.v1.placeholder(tf.string, [None])
            puts, takes, leaves, sizes = [], [], [], []
            for task in takers:
                with tf.device(f"{hosts[task]}/device:CPU:0"):
                    queue = raw.FIFOQueueV2(
                        component_types=[tf.string], capacity=1, container=name, shared_name=f"for_{task}"
                    )
                    puts.append(raw.QueueEnqueueV2(handle=queue, components=[self._message], name=f"to_{task}"))
                    takes += raw.QueueDequeueV2(handle=queue, component_types=[tf.string])
                    sizes.append(raw.QueueSizeV2(handle=queue))
                    leaves.append(raw.QueueCloseV2(handle=queue, cancel_pending_enqueues=True))
            self._put, self._take, self._leave, self._size = tf.group(puts), takes[0], leaves[0], sizes[0]
        config = tf.compat.v1.ConfigProto()
        tf_server.configure(config, member, [f"{hosts[task]}/device:CPU:0" for task in takers])
        self.session = tf.compat.v1.Session(tf_server.target(member), graph=graph, config=config)
        self._last = tf.compat.v1.RunOptions(timeout_in_ms=_LAST)
        if not member.is_chief:  # also if the program has no more use for it: worker 0 may have
            atexit.register(self.end)

    def end(self) -> None:
        """Let nobody leave before worker 0 is done with it; of worker 0: say that it is."""
        atexit.unregister(self.end)
        with suppress(Exception):
            if self._member.is_chief:
                self.session.run(self._put, {self._message: [_END]}, self._last)
            elif getattr(sys, "last_value", None) is None:  # else the program has failed
                self._serve()
        self.leave()

    def _serve(self) -> None:
        """Hold this worker's stage until worker 0 has closed its session, runs what nobody takes here, or has ended."""
        began = asked = time.monotonic()
        pause, is_told = _LOOK, False
        while not self.session.run(self._size):
            now = time.monotonic()
            if now - asked > _ASK:
                asked = now
                if not any(all_answer(self._member.workers[:1]) for _ in range(2)):  # a connection may break once
                    return
            if now - began > _TELL and not is_told:
                is_told = True
                print(f"{self._member.name} holds a stage until worker 0 ends", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, _RARELY)

    def leave(self) -> None:
        """Take no more part in it, without waiting for anybody; of others than worker 0: tell it, if it goes on."""
        atexit.unregister(self.end)
        with suppress(Exception):
            if not self._member.is_chief:
                self.session.run(self._leave)
        abandon(self.session)

    def send(self, texts: Sequence[bytes]) -> None:
        """Hand a message to all other workers.

        Raises:
            EOFError: one of them has closed its session; it says which.
        """
        tf = tensorflow()
        for piece, is_last in pieces(texts):
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


def pieces(texts: Sequence[bytes]) -> Iterator[tuple[Sequence[bytes], bool]]:
    """Yield the texts in pieces that can be sent at once, and whether each is the last one.

    Args:
        texts: of one message; one of them is never cut.
    """
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


# Flags on the devices of workers: lists of texts to which any worker of the job can add one, and that it can read.
#
#     worker 0   put([1], "text")  ──► list @ worker 1            worker 1   counts([1]) ──► 1
#
# They are in a session of their own, need no collective, and nobody waits for anybody but for the answer.

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
