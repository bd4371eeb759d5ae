"""A thread for calls into TensorFlow that may block for ever, so that the caller can abandon them.

    the program   run(call) ─────────── waits ──► the result, or the error of who left the call behind
    a thread             └─► call() ──► TensorFlow, perhaps for ever

A session numbers the steps of its collectives with what worker 0 tells, and asks for that without a limit: no timeout,
no cancellation and no closing ends it. Ctrl-C lets the call end first; a second one does not wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
_Asked = tuple[Callable[[], Any], "Future[Any]"]


class Runner:
    """Makes one call at a time, each in the same thread; a call that was left behind keeps that thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Asked | None] | None = None
        self._pending: Future[Any] | None = None

    def __del__(self) -> None:
        self._end()

    def run(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns, or raise what it raises.

        Raises:
            Exception: what `leave` was given meanwhile.
        """
        if self._calls is None:
            self._calls = SimpleQueue()
            # A daemon: Python ends although one of them waits in TensorFlow.
            threading.Thread(target=_serve, args=(self._calls,), name="autograph_runner", daemon=True).start()
        self._pending = pending = Future[Result]()
        self._calls.put((call, pending))
        try:
            return pending.result()
        except KeyboardInterrupt:
            with suppress(Exception):
                pending.exception()
            raise

    def leave(self, error: Exception) -> None:
        """Let the call that runs raise an error now, and nobody wait for it any more; from another thread."""
        self._end()
        if self._pending is not None:
            with suppress(InvalidStateError):  # it has ended after all
                self._pending.set_exception(error)

    def _end(self) -> None:
        """Let the thread end with its last call."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


class Question(Generic[Result]):
    """Asks something that may take long, or for ever, without waiting for it: the answer comes with a later call.

    Args:
        ask: returns the answer, or raises what means that there is none.
    """

    def __init__(self, ask: Callable[[], Result]) -> None:
        self._ask = ask
        self._answers: SimpleQueue[Result] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def answer(self) -> Result | None:
        """Return what was asked last time, and ask again; None where nobody has answered meanwhile."""
        found = None
        while not self._answers.empty():
            found = self._answers.get()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._wait, name="autograph_question", daemon=True)
            self._thread.start()
        return found

    def _wait(self) -> None:
        with suppress(Exception):
            self._answers.put(self._ask())


def _serve(calls: SimpleQueue[_Asked | None]) -> None:
    while (asked := calls.get()) is not None:
        _make(*asked)
        del asked  # what the call holds goes with it


def _make(call: Callable[[], Any], pending: Future[Any]) -> None:
    try:
        result = call()
    except BaseException as error:
        with suppress(InvalidStateError):
            pending.set_exception(error)
    else:
        with suppress(InvalidStateError):
            pending.set_result(result)
