"""A limit for the time that reading takes: an exception in the thread that reads, from one that waits.

in_time(read)      a thread waits ── 300 s ──► an exception in the thread of `read`, between two of its instructions

What is in C at that moment ends first; there it is parsing, whose time is that of the file's size. Signals would reach
the main thread only, and belong to the program.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from autograph_rewrite.diagnostics.limits import VARIABLE, limit
from autograph_rewrite.errors import RewriteError

T = TypeVar("T")

_AGAIN = 1.0
"""Seconds from one ring to the next."""


class _Interruption(BaseException):
    """Ends what the thread does; nothing catches it that catches errors."""


def in_time(read: Callable[[], T], *, name: str, error: type[RewriteError]) -> T:
    """Return what a function reads, unless it takes longer than the limit `seconds`.

    Args:
        read: what to call.
        name: of what it reads, for the message.
        error: type of what is raised then.

    Raises:
        RewriteError: of type `error`: it took longer, and was ended.
    """
    seconds = limit("seconds")
    alarm = _Alarm(seconds, threading.get_ident())
    try:
        alarm.start()
        try:
            return read()
        finally:
            alarm.end()
    except _Interruption:
        alarm.end()
        raise error(f"{name}: reading takes longer than {seconds} s ({VARIABLE}: seconds)") from None


class _Alarm(threading.Thread):
    """Rings until it is heard: an exception in a callback of the interpreter's is lost."""

    def __init__(self, seconds: float, thread: int) -> None:
        super().__init__(name="time_limit", daemon=True)
        self._seconds, self._thread = min(seconds, threading.TIMEOUT_MAX), ctypes.c_ulong(thread)
        self._lock, self._ended = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Wait, and ring."""
        pause = self._seconds
        while not self._ended.wait(pause):
            pause = _AGAIN
            with self._lock:
                if not self._ended.is_set():
                    _raise_in(self._thread, ctypes.py_object(_Interruption))

    def end(self) -> None:
        """Ring no more; what has rung and was not heard yet is forgotten."""
        with self._lock:
            self._ended.set()
        _raise_in(self._thread, None)


def _raise_in(thread: ctypes.c_ulong, error: object) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
