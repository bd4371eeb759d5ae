"""Limits: how large what is read may be, how long reading and matching take; the environment changes them.

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
        "depth": 100,  # of collections in each other there
        "seconds": 300,  # that reading a file takes
    }
)


def limit(name: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return a limit.

    Args:
        environ: where somebody may have set it.

    Raises:
        ConfigError: it is set to what is no number, or another limit is meant that does not exist.
    """
    given = dict(DEFAULTS)
    for entry in filter(None, environ.get(VARIABLE, "").split(",")):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key not in DEFAULTS or not value.isascii() or not value.isdigit():
            raise ConfigError(f"{VARIABLE}: '{entry}' sets no limit", hint=f"write NAME=NUMBER: {', '.join(DEFAULTS)}")
        given[key] = int(value)
    return given[name]


# A limit for the time that reading takes: an exception in the thread that reads, from one that waits.
#
# in_time(read)      a thread waits ── 300 s ──► an exception in the thread of `read`, between two of its instructions
#
# What is in C at that moment ends first; there it is parsing, whose time is that of the file's size. Signals would
# reach the main thread only, and belong to the program.

T = TypeVar("T")

_AGAIN = 1.0
"""Seconds from one ring to the next."""


class _Interruption(BaseException):
    """Ends what the thread does; nothing catches it that catches errors."""


def in_time(read: Callable[[], T], *, name: str, error: type[RewriteError]) -> T:
    """Return what a function reads, unless it takes longer than the limit `seconds`.

    Args:
        name: of what it reads, for the message.

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


# Patterns of a configuration: regular expressions that end in time, whoever wrote them.
#
#     variables: [{match: '(a|aa)+b', ...}]     on a name of sixty `a`s: an error after a second, not hours of searching
#
# Python's own `re` cannot be ended once it searches; `regex`, which understands the same expressions, can.

SECONDS = 1.0
"""Of one match; names are short, so a pattern that takes milliseconds is rare already."""
LENGTH = 10_000
"""Characters of a pattern: compiling it takes time that grows faster than it does."""


def check_pattern(pattern: str) -> None:
    """Check that a text is a regular expression.

    Raises:
        ValueError: it is none.
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


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name as a whole.

    Raises:
        ConfigError: nobody knows in time.
    """
    try:
        return regex.fullmatch(pattern, name, timeout=SECONDS) is not None
    except TimeoutError:
        raise ConfigError(
            f"the pattern {pattern!r} takes more than {SECONDS:g} s to be matched with '{name}'",
            hint="repetitions of what can be cut in several ways, as (a|aa)+, try them all: write it as a+",
        ) from None


def first_match(patterns: Iterable[str], name: str) -> int | None:
    """Return the number of the first pattern that matches a name as a whole; None if none does.

    Raises:
        ConfigError: nobody knows in time.
    """
    return next((i for i, pattern in enumerate(patterns) if matches(pattern, name)), None)
