"""A process that answers questions one at a time, and is killed when an answer takes too long."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


class NoAnswerError(Exception):
    """A question was not answered, and the process is gone.

    Attributes:
        hung: it was killed because it took too long; else it has ended by itself.
    """

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class Process:
    """One process.

    Args:
        serve: called in it with a pipe and `given`; it sends something once it is ready, and then, for each question,
            an answer and the memory that the process has taken.
        given: picklable.
        start: seconds that it may take to be ready.
        limit: seconds that an answer may take.
        memory: kilobytes with which it is full.

    Attributes:
        ready: what it has sent when it was.
        done: how many questions it has answered.
        is_full: it should be ended.
    """

    def __init__(self, serve: Callable[..., None], *given: Any, start: float, limit: float, memory: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, *given), daemon=True)
        self._process.start()
        other.close()
        self._limit, self._memory = limit, memory
        self.done, self.is_full = 0, False
        if not self._pipe.poll(start):
            raise RuntimeError("a worker did not start")
        self.ready: Any = self._pipe.recv()

    def ask(self, question: Any) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            NoAnswerError: the process hung or died.
        """
        try:
            self._pipe.send(question)
            if not self._pipe.poll(self._limit):
                self.end()
                raise NoAnswerError(f"no end after {self._limit:.0f} s", hung=True)
            answer, memory = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.end()
            raise NoAnswerError(f"the process died: exit code {code}") from None
        self.done += 1
        self.is_full = memory > self._memory
        found: dict[str, Any] = answer
        return found

    def end(self) -> None:
        """Kill the process."""
        self.is_full = True
        self._process.kill()
        self._process.join()
        self._pipe.close()
