"""Limit the size of input, and the time of reading and of matching patterns; the environment changes the limits.

AUTOGRAPH_REWRITE_LIMITS="bytes=100000000,nodes=50000" autograph-rewrite inspect uploaded.pb
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

import regex

from autograph_rewrite.errors import ConfigError, RewriteError

VARIABLE = "AUTOGRAPH_REWRITE_LIMITS"
DEFAULTS: Mapping[str, int] = MappingProxyType(
    {
        "bytes": 2**32,  # of a file
        "nodes": 10_000_000,  # of a graph, those of its functions included
        "name": 2**16,  # letters of the name of a node, a function or a device
        "expanded": 1_000_000,  # copies of the nodes of functions, of one call
        "text": 2**25,  # bytes of a configuration, or of a plan as text
        "depth": 100,  # of nested collections in a configuration or plan
        "seconds": 300,  # that reading a file takes
    }
)


def limit(name: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return a limit.

    Args:
        environ: the environment, whose `VARIABLE` may set it.

    Raises:
        ConfigError: `VARIABLE` sets a limit that does not exist, or sets one to something that is no number.
    """
    given = dict(DEFAULTS)
    for entry in filter(None, environ.get(VARIABLE, "").split(",")):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key not in DEFAULTS or not value.isascii() or not value.isdigit():
            raise ConfigError(f"{VARIABLE}: '{entry}' sets no limit", hint=f"write NAME=NUMBER: {', '.join(DEFAULTS)}")
        given[key] = int(value)
    return given[name]


# Limit the time of reading: a waiting thread raises an exception in the thread that reads.
#
# in_time(read)      a thread waits ── 300 s ──► an exception in the thread of `read`, between two of its instructions
#
# A running call of C code ends first; that is a parser, whose time is limited by the size of the file. Signals are no
# alternative: they reach only the main thread, and their handlers belong to the program.

T = TypeVar("T")

_AGAIN = 1.0
"""Seconds between two attempts to interrupt."""


class _Interruption(BaseException):
    """Interrupts a thread; handlers of `Exception` do not catch it."""


def in_time(read: Callable[[], T], *, name: str, error: type[RewriteError]) -> T:
    """Return the result of a function; interrupt it after the limit `seconds`.

    Args:
        name: of the file, for the message.

    Raises:
        RewriteError: of type `error`: the function took longer.
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
    """Interrupts a thread, repeatedly, because an exception in a callback of the interpreter is lost."""

    def __init__(self, seconds: float, thread: int) -> None:
        super().__init__(name="time_limit", daemon=True)
        self._seconds, self._thread = min(seconds, threading.TIMEOUT_MAX), ctypes.c_ulong(thread)
        self._lock, self._ended, self._has_raised = threading.Lock(), threading.Event(), False

    def run(self) -> None:
        """Wait, then interrupt until `end` is called."""
        pause = self._seconds
        while not self._ended.wait(pause):
            pause = _AGAIN
            with self._lock:
                if not self._ended.is_set():
                    self._has_raised = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(_Interruption))

    def end(self) -> None:
        """Interrupt no more; take an interruption that has not arrived yet."""
        try:
            with self._lock:
                self._ended.set()
            # An interruption arrives at the next jump back. Cancelling it instead (by NULL) would leave the flag set
            # that asks for it: all Python code would be slower from then on, and hang under a profiler.
            for _ in range(100 * self._has_raised):
                pass
        except _Interruption:
            self._ended.set()


# Patterns of a configuration, which may come from anybody: regular expressions with a limit on the time of a match.
#
#     variables: [{match: '(a|aa)+b', ...}]     on a name of sixty `a`s: an error after a second, not hours of searching
#
# Python's `re` cannot be interrupted; `regex`, which accepts the same expressions, has a timeout.

SECONDS = 1.0
"""The limit for one match; names are short, so few patterns take even milliseconds."""
LENGTH = 10_000
"""The most characters of a pattern, because the time of compiling grows faster than its length."""


def check_pattern(pattern: str) -> str:
    """Return a text that is a regular expression of limited length.

    Raises:
        ValueError: it is not.
    """
    if len(pattern) > LENGTH:
        raise ValueError(f"must be a regular expression of at most {LENGTH:,} characters, and has {len(pattern):,}")
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except RecursionError:
        raise ValueError("must be a regular expression with fewer brackets in each other") from None
    except (re.error, regex.error) as error:
        raise ValueError(f"must be a regular expression, and {pattern!r} is not: {error}") from None
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name.

    Raises:
        ConfigError: the match takes too long.
    """
    try:
        return regex.fullmatch(pattern, name, timeout=SECONDS) is not None
    except TimeoutError:
        raise ConfigError(
            f"the pattern {pattern!r} takes more than {SECONDS:g} s to be matched with '{name}'",
            hint="repetitions of what can be cut in several ways, as (a|aa)+, try them all: write it as a+",
        ) from None


def first_match(patterns: Iterable[str], name: str) -> int | None:
    """Return the index of the first pattern that matches a whole name; None if none does.

    Raises:
        ConfigError: a match takes too long.
    """
    return next((i for i, pattern in enumerate(patterns) if matches(pattern, name)), None)
