"""Exchange values between workers outside of any step: sums, broadcasts and flags; timeouts name the missing workers.

    compare what all are about to run  ──  adopt the chief's variables  ──  agree on a seed

They run in separate sessions, so they work before the first step in every mode, and their failure does not break the
collectives of the steps.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.liveness import PeerMonitor, all_answer, listed, missing, name_of
from autograph_rewrite.runtime.job.tf_server import counts, meet, session_of
from autograph_rewrite.runtime.job.watchdog import Closing, Watchdog

FIRST_KEY = 2**29
"""Group and instance keys of rendezvous; those of steps are spread over all numbers below 2^30 and above."""
ACCOUNTS, STOPS, MEANS = FIRST_KEY - 1, FIRST_KEY - 2, FIRST_KEY - 3
"""Group keys of other exchanges outside of steps, each its own: TensorFlow numbers the runs of each key, and a stop may
come from a signal while variables are averaged."""

NUMBERS = 2**24
"""How many numbers are sent at once: a message of gRPC cannot hold two gigabytes."""


WRITE = "write variables whose shards they hold"


@dataclass(frozen=True)
class Rendezvous:
    """Exchanges of one job. All workers must make the same ones in the same order.

    Attributes:
        seconds: how long to wait for the others.
        numbers: counts its exchanges, equally on all workers; None: the counter of exchanges outside of a step.
    """

    member: Membership
    seconds: float
    group: int = FIRST_KEY
    numbers: Iterator[int] | None = None
    tells: bool = True

    def _exchange(self, like: Array) -> RepeatedSum:
        key = FIRST_KEY + next(self.numbers or counts().exchanges)
        return RepeatedSum(self.member, self.seconds, like, self.group, key, tells=self.tells)

    def add_up(self, value: Array, what: str) -> Array:
        """Return the sum of the workers' arrays, of equal shape; int32, int64, float32 or float64.

        Raises:
            ClusterError: a worker is missing.
        """
        with self._exchange(value) as exchange:
            return exchange.add_up(value, what)

    def meet(self, what: str) -> None:
        """Wait until all workers call this.

        Raises:
            ClusterError: a worker is missing.
        """
        self.add_up(np.zeros((), np.int32), what)

    def rows(self, value: Array, what: str) -> Array:
        """Return the workers' arrays, of equal shape, stacked in their order."""
        return self.add_up(table_of(self.member, value), what)

    def texts(self, text: str, what: str) -> list[str]:
        """Return the texts of all workers."""
        return [data.decode() for data in self.contents(text.encode(), what)]

    def contents(self, data: bytes, what: str) -> list[bytes]:
        """Return the data of all workers, of any length, in their order."""
        sizes = self.rows(np.array(len(data), np.int64), what)
        words = np.zeros((int(sizes.max()) + 3) // 4, np.int32)
        words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        pieces = [self.rows(words[i : i + NUMBERS], what) for i in range(0, words.size, NUMBERS)]
        rows = np.concatenate(pieces, axis=1) if pieces else np.zeros((len(sizes), 0), np.int32)
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def rounds(self, count: int, what: str) -> list[tuple[int, int]]:
        """Meet `count` times; return when each meeting began and ended, in nanoseconds by the clock of this process."""
        mine, found = np.zeros((), np.int32), []
        with self._exchange(mine) as exchange:
            exchange.add_up(mine, what)  # not measured: it waits for connections, and for late workers
            for _ in range(count):
                begin = time.time_ns()
                exchange.add_up(mine, what)
                found.append((begin, time.time_ns()))
        return found

    def of_chief(self, values: Iterable[Array], what: str) -> Iterator[Array]:
        """Yield the arrays of worker 0, in order; all workers give arrays of the same types and shapes, and take all.

        Arrays are read and sent a few at a time, so that the memory of a process need not hold a model twice.
        """
        for batch in _batches(values):
            yield from self._texts_of_chief(batch, what) if batch[0].dtype == object else self._sent(batch, what)

    def _texts_of_chief(self, batch: Sequence[Array], what: str) -> Iterator[Array]:
        said = [[word.decode("latin-1") for word in value.ravel()] for value in batch]
        for value, words in zip(batch, json.loads(self.texts(json.dumps(said), what)[0]), strict=True):
            yield np.array([word.encode("latin-1") for word in words], object).reshape(value.shape)

    def _sent(self, batch: Sequence[Array], what: str) -> Iterator[Array]:
        count = sum(value.nbytes for value in batch)
        bits = np.zeros(-(-count // 4), np.int32)  # a sum of integers keeps every bit
        flat = bits.view(np.uint8)[:count].view(batch[0].dtype)
        if self.member.is_chief:
            np.concatenate([value.reshape(-1) for value in batch], out=flat)
        for at in range(0, bits.size, NUMBERS):
            bits[at : at + NUMBERS] = self.add_up(bits[at : at + NUMBERS], what)
        ends = np.cumsum([value.size for value in batch])
        for value, end in zip(batch, ends, strict=True):
            yield flat[end - value.size : end].reshape(value.shape)


def _batches(values: Iterable[Array]) -> Iterator[list[Array]]:
    """Yield neighbours of one type together, up to what is sent at once."""
    batch: list[Array] = []
    size = 0
    for value in map(np.asarray, values):
        if batch and (value.dtype != batch[0].dtype or size + value.nbytes > 4 * NUMBERS):
            yield batch
            batch, size = [], 0
        batch.append(value)
        size += value.nbytes
    if batch:
        yield batch


# An all-reduce between workers outside of any step, in a separate session.

Array = np.ndarray[Any, Any]


def table_of(member: Membership, mine: Array) -> Array:
    """Return a worker's summand of a table with a row for each worker: its row, and zeros for the others."""
    table = np.zeros((len(member.workers), *mine.shape), mine.dtype)
    table[member.task] = mine
    return table


class RepeatedSum:
    """A sum over workers that can be computed again and again. Use it as a context manager, or close it.

    Args:
        like: an array with the shape and type of the summands; int32, int64, float32 or float64.
        key: the instance key, unique among the exchanges of the group.
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
        self._session = session_of(graph, member)
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

        Raises:
            ClusterError: a worker is missing.
        """
        if not self._has_met:
            meet(self._member, self._seconds, what)
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


# Means of variables over all replicas, outside of any step (`local_sgd`).
#
# replica 0: w = 1, replica 1: w = 3      ─► 2 in this process, which all others do likewise ─► 2 in each copy


def replica_means(rows: Sequence[Sequence[Array]], member: Membership | None, seconds: float) -> list[Array]:
    """Return the mean of each variable over the replicas of all workers, which call this together.

    Args:
        rows: for each variable, its values on the replicas of this process.
        member: this process; None where there are no others.

    Raises:
        ClusterError: a worker is missing.
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
    with RepeatedSum(member, seconds, joined, MEANS, 1 + joined.size % 2**20) as exchange:
        joined = exchange.add_up(joined, "average the variables of all replicas")
    ends = np.cumsum([part.size for part in flat])[:-1]
    parts = np.split(joined, ends)
    return [part.view(total.dtype).reshape(total.shape) for part, total in zip(parts, totals, strict=True)]


# Messages between workers without collectives: broadcasts through queues on the receivers.
#
#     worker 0   run ──► values ──► queue @ worker 1, queue @ worker 2, ...
#     worker 1   takes from its own queue: it waits there for nobody else
#
# A message is a list of texts, of any length. Worker 0 is never more than one message ahead of any receiver. The queues
# are in a separate session.

PIECE = 2**29
"""Bytes of one message, about: TensorFlow sends no tensor of two gigabytes."""
_END, _MORE = b"end", b"more"
_LAST = 5_000
"""Milliseconds that worker 0 takes at most to say that it has ended."""
_LOOK, _RARELY, _ASK, _TELL = 0.002, 0.1, 1.0, 10.0
"""Seconds in `_hold`: between two looks whether it is over, at first and later; between two looks at the others; until
it prints a message."""


class Relay:
    """The queues of one session. Worker 0 sends, all others take.

    Args:
        name: of these queues, equal on all workers and unique among the queues of the job.
        holds: whether the other workers stay until worker 0, which runs operations on their devices, has ended.
    """

    def __init__(self, member: Membership, name: str, *, holds: bool) -> None:
        tf = tensorflow()
        raw, graph = tf.raw_ops, tf.Graph()
        hosts = [f"/job:worker/replica:0/task:{task}" for task in range(len(member.workers))]
        takers = range(1, len(hosts)) if member.is_chief else [member.task]
        self._member = member
        self._names = {f"to_{task}": name_of("worker", task, member.workers[task]) for task in takers}
        with graph.as_default():
            self._message = tf.compat.v1.placeholder(tf.string, [None])
            puts, takes, leaves, sizes, closed = [], [], [], [], {}
            for task in range(1, len(hosts)):
                with tf.device(f"{hosts[task]}/device:CPU:0"):
                    queue = raw.FIFOQueueV2(
                        component_types=[tf.string], capacity=1, container=name, shared_name=f"for_{task}"
                    )
                    closed[name_of("worker", task, member.workers[task])] = raw.QueueIsClosedV2(handle=queue)
                    if task not in takers:
                        continue
                    puts.append(raw.QueueEnqueueV2(handle=queue, components=[self._message], name=f"to_{task}"))
                    takes += raw.QueueDequeueV2(handle=queue, component_types=[tf.string])
                    sizes.append(raw.QueueSizeV2(handle=queue))
                    leaves.append(raw.QueueCloseV2(handle=queue, cancel_pending_enqueues=True))
            self._closed = closed
            self._put, self._take, self._leave, self._size = tf.group(puts), takes[0], leaves[0], sizes[0]
        self.session = session_of(graph, member, [f"{host}/device:CPU:0" for host in hosts[1:]])
        self._last = tf.compat.v1.RunOptions(timeout_in_ms=_LAST)
        self._holds = holds
        if not member.is_chief:  # keeps the relay alive although the program drops it: worker 0 may still need it
            atexit.register(self.end)
            for stay in counts().stays:  # to run before `end`: that waits for worker 0, which may wait for a `stay`
                atexit.unregister(stay)
                atexit.register(stay)

    def end(self) -> None:
        """Leave the relay once worker 0 is done with it; on worker 0: say so, and leave."""
        atexit.unregister(self.end)
        with suppress(Exception):
            if self._member.is_chief:
                self.session.run(self._put, {self._message: [_END]}, self._last)
            elif self._holds and getattr(sys, "last_value", None) is None:  # else the program has failed
                self._serve()
        self.leave()

    def _serve(self) -> None:
        """Hold this worker's stage until worker 0 has ended, or puts a message that is not taken here."""
        name, chief = self._member.name, self._member.workers[0]
        _hold(
            lambda: bool(self.session.run(self._size)),
            lambda: _answers(chief),
            lambda: f"{name} holds a stage until worker 0 ends",
        )

    def leave(self) -> None:
        """Leave the relay without waiting; a worker other than 0 closes its queue, so that worker 0 learns of it."""
        atexit.unregister(self.end)
        with suppress(Exception):
            if not self._member.is_chief:
                self.session.run(self._leave)
        abandon(self.session)

    def leave_as_one_of_all(self) -> bool:
        """Leave the relay; return whether all workers have left it, so that its shared variables can be freed.

        Each worker first says that it leaves and then looks at the others. So of two that leave at the same time, at
        least one sees that both have left.
        """
        atexit.unregister(self.end)
        has_ended = self._member.is_chief
        with suppress(Exception):
            if self._member.is_chief:
                self.session.run(self._put, {self._message: [_END]}, self._last)
            else:
                self.session.run(self._leave)
                has_ended = bool(self.session.run(self._size)) and self.session.run(self._take)[0] == _END
        return has_ended and len(self.left()) == len(self._closed)

    def left(self) -> list[str]:
        """Return the workers other than worker 0 that have left the relay."""
        found: dict[str, bool] = {}
        with suppress(Exception):  # a worker that does not answer is reported by the process that waits for it
            found = self.session.run(self._closed, options=self._last)
        return [name for name, is_closed in found.items() if is_closed]

    def send(self, texts: Sequence[bytes]) -> None:
        """Send a message to all other workers.

        Raises:
            EOFError: one of them has left the relay; the message is its name.
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
        """Wait for a message from worker 0, with these RunOptions.

        Raises:
            EOFError: worker 0 has left the relay.
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
    """Yield pieces of a message of about `PIECE` bytes at most, each of whole texts, and whether each is the last."""
    begin, size = 0, 0
    for at, text in enumerate(texts):
        if size and size + len(text) > PIECE:
            yield texts[begin:at], False
            begin, size = at, 0
        size += len(text)
    yield texts[begin:], True


def abandon(session: Any) -> None:
    """Mark a session as closed without closing it: closing would wait for a process that is gone."""
    session._closed, session._session = True, None


# Flags on the devices of workers: lists of texts that any worker of the job can read and extend.
#
#     worker 0   put([1], "text")  ──► list @ worker 1            worker 1   counts([1]) ──► 1
#
# They are in a separate session and need no collective. A worker waits only for the answer.

_PATIENCE = 3_000
"""Milliseconds to wait for an answer."""


class Flags:
    """The flags of one name on some workers. Close them.

    Args:
        name: of the flags, equal on all workers and unique in the job.
        target: the session's target, given by a parameter server; "": this worker's server.
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
        self._options = tf.compat.v1.RunOptions(timeout_in_ms=_PATIENCE)
        self._session = session_of(graph, member, hosts, target)

    def put(self, text: str = "") -> None:
        """Add a text to each flag.

        Raises:
            tf.errors.OpError: a worker does not answer.
        """
        self._run(self._puts, {self._text: text})

    def counts(self) -> list[int]:
        """Return the number of texts in each flag.

        Raises:
            tf.errors.OpError: a worker does not answer.
        """
        return [int(count) for count in self._run(self._sizes)]

    def texts(self, at: int) -> list[str]:
        """Return a text of each flag.

        Args:
            at: its index; each flag has more texts than that.

        Raises:
            tf.errors.OpError: a worker does not answer.
        """
        return [bytes(text).decode() for text in self._run(self._texts, {self._at: at})]

    def _run(self, fetches: list[object], feeds: Mapping[object, object] | None = None) -> Sequence[Any]:
        try:
            found: Sequence[Any] = self._session.run(fetches, feeds, options=self._options)
        except tensorflow().errors.OpError:
            abandon(self._session)  # closing would wait for the worker that does not answer
            raise
        return found

    def close(self) -> None:
        """Release the session."""
        with suppress(Exception):
            self._session.close()


def put(member: Membership, name: str, tasks: Sequence[int], target: str = "", text: str = "") -> None:
    """Add a text to the flags of a name on some workers.

    Args:
        target: the session's target, given by a parameter server; "": this worker's server.

    Raises:
        tf.errors.OpError: a worker does not answer.
    """
    flags = Flags(member, name, tasks, target)
    flags.put(text)
    flags.close()


# The end of a program whose variables are sharded over workers: a worker may have to send its shards until all others
# have ended.


def stay_for_others(member: Membership, name: str, leave: Callable[[], None]) -> None:
    """Let this process, when its program ends, wait until the programs of all other workers have ended or failed.

    Args:
        name: equal on all workers and unique in the job.
        leave: a method, not kept alive, that tells workers which wait in a step that this one makes no more steps.
    """
    stay = functools.partial(_stay, member, f"{name}.ended", weakref.WeakMethod(leave))
    counts().stays.append(stay)
    atexit.register(stay)


def _stay(member: Membership, name: str, leave: weakref.WeakMethod[Callable[[], None]]) -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # the program has failed: the others will see that this process is gone
    if (tell := leave()) is not None:
        tell()
    remaining = {task for task in range(len(member.workers)) if task != member.task}
    for task in remaining:
        with suppress(Exception):
            put(member, name, [task], text=str(member.task))
    with suppress(Exception):
        _await(member, name, remaining)


def _await(member: Membership, name: str, remaining: set[int]) -> None:
    mine = Flags(member, name, [member.task])

    def is_over() -> bool:
        remaining.difference_update([int(mine.texts(at)[0]) for at in range(mine.counts()[0])])
        return not remaining

    def are_there() -> bool:
        remaining.intersection_update([task for task in remaining if _answers(member.workers[task])])
        return bool(remaining)

    def told() -> str:
        workers = listed(f"worker {task}" for task in sorted(remaining))
        return f"{member.name} holds parts of variables until the end of {workers}"

    _hold(is_over, are_there, told)
    mine.close()


def _answers(address: str) -> bool:
    return any(all_answer([address]) for _ in range(2))  # a connection may break once


def _hold(is_over: Callable[[], bool], is_awaited: Callable[[], bool], told: Callable[[], str]) -> None:
    """Keep this process alive until the others need it no more; print a message if that takes long.

    Args:
        is_over: whether the others have said that they need it no more.
        is_awaited: whether one of the others still runs.
    """
    began = asked = time.monotonic()
    pause, is_told = _LOOK, False
    while not is_over():
        now = time.monotonic()
        if now - asked > _ASK:
            asked = now
            if not is_awaited():
                return
        if now - began > _TELL and not is_told:
            is_told = True
            print(told(), file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, _RARELY)
