"""A session on the stages of all workers: worker 0 runs them, the others make the same calls and are given the results.

    worker 0   session.run(["loss", "train"], feeds) ──► stages @ worker 0, worker 1 ──► values ──► relay
    worker 1   session.run(["loss", "train"], feeds) ──────── waits ─────────────────────────────────┴──► values

All feed the whole batch. What each was asked for, and has fed, goes with the values and is compared.
"""

from __future__ import annotations

import json
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.plan.membership import Membership
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.missing import is_of_the_job
from autograph_rewrite.runtime.peers import all_answer
from autograph_rewrite.runtime.relay import Relay, abandon

_WIDTH = 200
_OF_FEEDS = (ValueError, TypeError)
"""What a session raises for feeds that do not fit; the errors of what it runs are OpErrors."""


class Driven:
    """What a tf.compat.v1.Session does, done by worker 0 for all.

    Args:
        session: on the stages of all workers; of other workers, one that runs nothing of the program's steps.
        relay: hands the results over.
        member: this process.
    """

    def __init__(self, session: Any, relay: Relay, member: Membership) -> None:
        self._tf = tensorflow()
        self._relay, self._member = relay, member
        self._problem: ClusterError | None = None
        self.session = self._running = session
        self._end = weakref.finalize(self, _close, session, relay, member) if member.is_chief else None

    @property
    def graph(self) -> Any:
        """The tf.Graph."""
        return self.session.graph

    def close(self) -> None:
        """Release the sessions' resources; others than worker 0 wait until it has done so."""
        if self._end is not None:
            self._end()
        else:
            _close(self.session, self._relay, self._member)

    def leave(self) -> None:
        """Close the session of a program that has failed, and wait for nobody."""
        self.close() if self._member.is_chief else self._relay.leave()

    def abandon(self) -> None:
        """Leave the sessions as they are until the process ends."""
        if self._end is not None:
            self._end.detach()
        abandon(self.session)
        self._relay.leave()

    def start_cancel(self) -> None:
        """End what runs, by closing its session from another thread."""
        self._running.close()

    def run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None, options: Any = None) -> Any:
        """Run tensors and operations of the graph on worker 0, for all workers.

        Raises:
            ClusterError: this worker has not called what worker 0 has.
        """
        if self._problem is not None:
            raise self._problem
        elements = self._tf.nest.flatten(fetches)
        names = [element.name for element in elements]
        call = {"fetches": names, "feeds": _digests(feeds or {})}
        try:
            if self._member.is_chief:
                values = self._drive(call, elements, feeds, options)
            else:
                values = self._follow(call, options)
        except EOFError as error:
            problem = f"{self._member.name} runs {_listed(names)}, but {error} has closed its session"
            hint = "look at what it printed last: do all workers run the same program, and have equally many batches?"
            raise self._parted(problem, hint) from None
        return self._tf.nest.pack_sequence_as(fetches, values)

    def _drive(self, call: Mapping[str, Any], elements: Sequence[Any], feeds: Any, options: Any) -> list[Any]:
        try:
            values: list[Any] = self.session.run(elements, feeds, options=options)
        except (self._tf.errors.OpError, *_OF_FEEDS) as error:
            if not is_of_the_job(error):  # it is the program's own, in all workers
                code = getattr(error, "error_code", type(error).__name__)
                failed = {**call, "error": [code, getattr(error, "message", str(error))]}
                self._send([json.dumps(failed).encode()])
            raise
        self._send([json.dumps(call).encode(), *map(self._encoded, values)])
        return values

    def _send(self, texts: Sequence[bytes]) -> None:
        self._running = self._relay.session
        self._relay.send(texts)
        self._running = self.session

    def _follow(self, call: Mapping[str, Any], options: Any) -> list[Any]:
        self._running = self._relay.session
        head, *texts = self._relay.take(options)
        self._running = self.session
        theirs = json.loads(head)
        self._require_the_same(call, theirs)
        if "error" in theirs:
            raise self._error(*theirs["error"])
        found = dict(zip(theirs["fetches"], texts, strict=True))
        return [self._decoded(found[name]) for name in call["fetches"]]

    def _error(self, code: int | str, message: str) -> Exception:
        """Return the error that worker 0 has got from the program's own computation."""
        for kind in _OF_FEEDS:
            if code == kind.__name__:
                return kind(message)
        made: Exception = self._tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)
        return made

    def _require_the_same(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Refuse values that this worker has not asked for, or that other examples gave.

        Raises:
            ClusterError: this worker and worker 0 do something else; no run can follow.
        """
        name = self._member.name
        hint = "stages are no replicas: every worker makes the same calls, and feeds the whole batch"
        if set(mine["fetches"]) != set(theirs["fetches"]):
            problem = f"{name} runs {_listed(mine['fetches'])}, but worker 0 runs {_listed(theirs['fetches'])}"
            raise self._parted(problem, hint)
        if mine["feeds"] != theirs["feeds"]:
            both = {**theirs["feeds"], **mine["feeds"]}
            odd = [key for key in both if mine["feeds"].get(key) != theirs["feeds"].get(key)]
            raise self._parted(f"{name} feeds {_listed(odd)} with other values than worker 0", hint)

    def _parted(self, problem: str, hint: str) -> ClusterError:
        """Return the error of a worker that does something else than worker 0, for this call and all later ones."""
        self._problem = ClusterError(problem, hint=hint)
        if not self._member.is_chief:
            self._relay.leave()
        return self._problem

    def _encoded(self, value: Any) -> bytes:
        return b"" if value is None else bytes(self._tf.make_tensor_proto(value).SerializeToString())

    def _decoded(self, text: bytes) -> Any:
        from tensorflow.core.framework import tensor_pb2

        if not text:
            return None
        value = self._tf.make_ndarray(tensor_pb2.TensorProto.FromString(text))
        return value if value.ndim else value[()]


def _close(session: Any, relay: Relay, member: Membership) -> None:
    """Release what a session holds, unless somebody is gone, who would be waited for, or all end with the program."""
    others_are_there = not member.is_chief or all_answer(member.workers[1:])
    if others_are_there and (not member.is_chief or threading.main_thread().is_alive()):
        session.close()
    else:
        abandon(session)
    relay.end() if others_are_there else relay.leave()


def _digests(feeds: Mapping[Any, Any]) -> dict[str, Any]:
    """Return type, shape and a checksum of what is fed, by name."""
    found = {}
    for key, given in feeds.items():
        value = np.asarray(given)
        is_text = value.dtype.kind in "OSU"
        data: Any = repr(value.tolist()).encode() if is_text else value.reshape(-1).view(np.uint8)
        found[key if isinstance(key, str) else key.name] = [str(value.dtype), list(value.shape), zlib.crc32(data)]
    return found


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(f"'{name}'" for name in names)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
