"""Files that worker 0 writes for all: the others go on once they are whole, and learn of it if they will never be.

    worker 0   model.save(path) ─► whole ─► a flag on the device of each other worker, and on with the program
    worker 1   model.save(path) ─► looks for the flag on its device ─► keras.saving.load_model(path)

Worker 0 waits for nobody: it may save what the others do not (`if task == 0`), and end when it has. A flag says at
which batch of the model it was put, and of which path, so that one that nobody looked for is not taken for another.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.load.signature.keras_library import wraps
from autograph_rewrite.runtime.consensus import flags
from autograph_rewrite.runtime.failures import liveness
from autograph_rewrite.runtime.failures.failure_messages import missing
from autograph_rewrite.runtime.job import tf_server

Result = TypeVar("Result")
_LOOK, _ASK, _TELLS, _OTHER = 0.01, 1.0, 3.0, 0.5
"""Seconds between two looks for a flag and between two at worker 0, that worker 0 takes to put flags, and after which
one of another path is taken."""
_SAID = 1_000
"""Characters of an error that are kept for the others."""


class _Told(NamedTuple):
    """A call of worker 0 that is over."""

    what: str
    when: str
    path: str = ""
    error: str = ""


class WrittenFiles:
    """The files of one model.

    Args:
        member: this process.
        seconds: how long to wait for worker 0.
        at: returns how many batches the model was given.
        is_alone: returns whether workers do not wait for each other.
    """

    def __init__(self, member: Membership, seconds: float, at: Callable[[], int], is_alone: Callable[[], bool]) -> None:
        self._member, self._seconds, self._at, self._is_alone = member, seconds, at, is_alone
        self._name = f"files.{tf_server.next_channel()}"
        self._is_writing = False
        self._runs = 0
        self._flags: flags.Flags | None = None
        self._seen = 0
        self._told: list[_Told] = []

    def of_chief(self, write: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a method that only worker 0 runs, and that is over on all workers when it has.

        Args:
            write: writes files; its first argument is a path, if it has one.
            what: its name.
        """

        @wraps(write)
        def left_to_the_chief(*args: Any, **kwargs: Any) -> None:
            self._wait(self._call(what, args, kwargs))

        @wraps(write)
        def written(*args: Any, **kwargs: Any) -> Any:
            if self._is_writing:  # a part of what is being written
                return write(*args, **kwargs)
            self._is_writing = True
            try:
                return self._run_and_tell(functools.partial(write, *args, **kwargs), self._call(what, args, kwargs))
            finally:
                self._is_writing = False

        return written if self._member.is_chief else left_to_the_chief

    def at_end(self, run: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a method that all workers run, and that is over when worker 0 has run it: its callbacks write, too.

        Args:
            run: the method.
            what: its name.
        """

        @wraps(run)
        def ran(*args: Any, **kwargs: Any) -> Any:
            self._runs += 1
            told = _Told(what, f"call {self._runs}")
            call = functools.partial(run, *args, **kwargs)
            if self._member.is_chief:
                return self._run_and_tell(call, told)
            result = call()
            self._wait(told)
            return result

        return ran

    def _call(self, what: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Told:
        path = next(iter((*args, *kwargs.values())), "")
        return _Told(what, f"batch {self._at()}", str(path) if isinstance(path, str | os.PathLike) else "")

    def _run_and_tell(self, call: Callable[[], Result], told: _Told) -> Result:
        """Run something on worker 0, and tell the others what became of it."""
        try:
            result = call()
        except Exception as error:
            self._tell(told._replace(error=f"{type(error).__name__}: {error}"[:_SAID]))
            raise
        self._tell(told)
        return result

    def _tell(self, told: _Told) -> None:
        def put() -> None:
            statuses = liveness.ask(liveness.others(self._member, {"worker": self._member.workers}), liveness.PATIENCE)
            there = liveness.workers_in(name for name, status in statuses.items() if status == "OK")
            with suppress(Exception):  # who has just gone is missed in the next step
                flags.put(self._member, self._name, there, text=json.dumps(told))

        if self._is_alone():
            return
        # In a thread: a session waits without end for who goes while it opens.
        thread = threading.Thread(target=put, name="autograph_flags", daemon=True)
        thread.start()
        thread.join(_TELLS)

    def _wait(self, call: _Told) -> None:
        """Wait until worker 0 has told of a call.

        Raises:
            ClusterError: its call has failed, or worker 0 is missing, or does not come to it.
        """
        if self._is_alone():
            return
        began = asked = time.monotonic()
        doing, lookout = f"be done with '{call.what}'", liveness.PeerMonitor(self._member, self._seconds)
        lost: list[str] = []
        while (told := self._answer(call, is_late=bool(lost) or time.monotonic() - began > _OTHER)) is None:
            now = time.monotonic()
            if lost or now - began > self._seconds:
                raise missing(self._member, doing, self._seconds, lost=lost)
            if now - asked > _ASK:  # it may have told, and ended: look once more
                lost, asked = [name for name in lookout.lost() if name.startswith("worker 0 ")], now
            else:
                time.sleep(_LOOK)
        self._told.remove(told)
        if told.error:
            raise ClusterError(
                f"'{call.what}' has failed on worker 0, which writes for all: {told.error}",
                hint="look at what it printed last",
            )

    def _answer(self, call: _Told, *, is_late: bool) -> _Told | None:
        """Return what worker 0 has said of a call; None if it has not yet.

        Args:
            call: of this worker.
            is_late: that of another path is taken, too, as where each worker gives its own.
        """
        if self._flags is None:
            self._flags = flags.Flags(self._member, self._name, [self._member.task])
        for at in range(self._seen, self._flags.counts()[0]):
            self._told += [_Told(*json.loads(text)) for text in self._flags.texts(at)]
            self._seen = at + 1
        found = [told for told in self._told if (told.what, told.when) == (call.what, call.when)]
        return next((told for told in found if told.path == call.path), found[0] if found and is_late else None)
