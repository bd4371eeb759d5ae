"""Chief-driven session over the stages of all workers: the others replay its calls and receive the results.

    worker 0   session.run(["loss", "train"], feeds) ──► stages @ worker 0, worker 1 ──► values ──► relay
    worker 1   session.run(["loss", "train"], feeds) ──────── waits ─────────────────────────────────┴──► values

All feed the whole batch. What each is asked for, and feeds, is compared while the run goes on (`beside`).
"""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.channel import Relay, abandon
from autograph_rewrite.runtime.job.digests import Account, Beside, described
from autograph_rewrite.runtime.job.liveness import all_answer, is_of_the_job

_WIDTH = 200
_HINT = "stages are no replicas: every worker makes the same calls, and feeds the whole batch"
_HINT_GONE = "look at what it printed last: do all workers run the same program, and have equally many batches?"
_OF_FEEDS = (ValueError, TypeError)
"""What a session raises for feeds that do not fit; the errors of what it runs are OpErrors."""


class ChiefDrivenSession:
    """What a tf.compat.v1.Session does, done by worker 0 for all.

    Args:
        session: on the stages of all workers; of other workers, one that runs nothing of the program's steps.
        relay: hands the results over.
        member: this process.
        seconds: how long to wait for the others.

    Attributes:
        changed: what else all workers have in common in the next run, by name.
    """

    def __init__(self, session: Any, relay: Relay, member: Membership, seconds: float) -> None:
        self._tf = tensorflow()
        self._beside = Beside(member, seconds)
        self._runs = 0
        self.changed: Mapping[str, str] = {}
        self._relay, self._member = relay, member
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

        Args:
            fetches: nested tensors and operations of the graph.
            feeds: values by tensor.

        Raises:
            ClusterError: this worker has not called what worker 0 has.
        """
        elements = self._tf.nest.flatten(fetches)
        names = [element.name for element in elements]
        self._runs += 1
        what = f"run {self._runs} of the session"
        self._beside.start(functools.partial(_account, what, names, dict(feeds or {}), self.changed))
        self.changed = {}
        try:
            values = (
                self._run_on_chief(names, elements, feeds, options) if self._member.is_chief else self._follow(options)
            )
        except EOFError as error:
            problem = self._beside.problem(failed=True)
            if problem is None:
                said = f"{self._member.name} runs {_listed(names)}, but {error} has closed its session"
                problem = ClusterError(said, hint=_HINT_GONE)
            raise self._diverged(problem) from None
        except (self._tf.errors.OpError, *_OF_FEEDS) as error:
            problem = self._beside.problem(failed=True)
            if problem is not None:
                raise self._diverged(problem) from error
            raise
        problem = self._beside.problem()
        if problem is not None:
            raise self._diverged(problem)
        return self._tf.nest.pack_sequence_as(fetches, [values[name] for name in names])

    def _run_on_chief(self, names: Sequence[str], elements: Sequence[Any], feeds: Any, options: Any) -> dict[str, Any]:
        try:
            values: list[Any] = self.session.run(elements, feeds, options=options)
        except (self._tf.errors.OpError, *_OF_FEEDS) as error:
            if not is_of_the_job(error):  # it is the program's own, in all workers
                code = getattr(error, "error_code", type(error).__name__)
                failed = {"fetches": names, "error": [code, getattr(error, "message", str(error))]}
                self._send([json.dumps(failed).encode()])
            raise
        self._send([json.dumps({"fetches": names}).encode(), *map(self._encoded, values)])
        return dict(zip(names, values, strict=True))

    def _send(self, texts: Sequence[bytes]) -> None:
        self._running = self._relay.session
        self._relay.send(texts)
        self._running = self.session

    def _follow(self, options: Any) -> dict[str, Any]:
        self._running = self._relay.session
        head, *texts = self._relay.take(options)
        self._running = self.session
        theirs = json.loads(head)
        if "error" in theirs:
            raise self._error(*theirs["error"])
        return dict(zip(theirs["fetches"], map(self._decoded, texts), strict=True))

    def _error(self, code: int | str, message: str) -> Exception:
        """Return the error that worker 0 has got from the program's own computation."""
        for kind in _OF_FEEDS:
            if code == kind.__name__:
                return kind(message)
        made: Exception = self._tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)
        return made

    def _diverged(self, problem: ClusterError) -> ClusterError:
        """Return the error of workers that do not do the same; worker 0 is not waited for any more."""
        if not self._member.is_chief:
            self._relay.leave()
        return problem

    def _encoded(self, value: Any) -> bytes:
        return b"" if value is None else bytes(self._tf.make_tensor_proto(value).SerializeToString())

    def _decoded(self, text: bytes) -> Any:
        if not text:
            return None
        value = self._tf.make_ndarray(proto("TensorProto").FromString(text))
        return value if value.ndim else value[()]


def _close(session: Any, relay: Relay, member: Membership) -> None:
    """Release what a session holds, unless somebody is gone, who would be waited for, or all end with the program."""
    others_are_there = not member.is_chief or all_answer(member.workers[1:])
    if others_are_there and (not member.is_chief or threading.main_thread().is_alive()):
        session.close()
    else:
        abandon(session)
    relay.end() if others_are_there else relay.leave()


def _account(what: str, names: Sequence[str], feeds: Mapping[Any, Any], changed: Mapping[str, str]) -> Account:
    """Return what a worker tells of a run."""
    fed = {f"'{key if isinstance(key, str) else key.name}'": described(value) for key, value in feeds.items()}
    return Account(what, {"what is fetched": _listed(sorted(set(names))), **fed, **changed}, hint=_HINT)


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(f"'{name}'" for name in names)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
