"""Ends a step that hangs: replicas that wait for one another use no processor time.

TensorFlow's own timeouts on collectives start a sleeping thread for every execution, and a call that hangs does not
even see Ctrl-C. So one thread per program looks at the running step every now and then, and cancels it when the whole
process has been idle for too long. A step that computes is never cut short, however long it takes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from autograph_rewrite.runtime.calls import cancellation_manager

_ASK = 1.0
"""Seconds of waiting after which, again and again, we ask whether the others are still there."""
_BUSY = 0.05
"""Share of one processor below which a process counts as idle."""


class Watchdog:
    """Watches one kind of step.

    Args:
        seconds: how long the process may be idle in a step.
        is_lost: tells whether waiting is vain, as the process that is waited for has ended; asked while idle.
    """

    def __init__(self, seconds: float, is_lost: Callable[[], bool] | None = None) -> None:
        self.seconds = seconds
        self._is_lost = is_lost
        self._asked = 0.0  # how long the process had been idle when that was asked
        self.expired = False
        self._failed = False
        self._manager = cancellation_manager()
        self._running = 0  # the number of the step that runs; 0 between steps
        self._steps = 0
        self._seen = 0
        self._idle = 0.0
        self._cpu = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Any:
        """Begin a step; return its cancellation manager."""
        if self._failed:
            self._manager, self.expired, self._failed = cancellation_manager(), False, False
        self._steps += 1
        self._running = self._steps
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._period()), daemon=True)
            self._thread.start()
        return self._manager

    def stop(self, *, failed: bool = False) -> None:
        """End a step; TensorFlow itself cancels the manager of a step that fails, so it is not used again."""
        self._running = 0
        self._failed = failed

    def _period(self) -> float:
        return min(1.0, self.seconds / 8)

    def look(self, elapsed: float) -> None:
        """Cancel the running step if the process has been idle for too long (called by the thread)."""
        step, cpu = self._running, time.process_time()
        busy = cpu - self._cpu > _BUSY * elapsed
        self._cpu = cpu
        if not step or step != self._seen or busy:
            self._seen, self._idle, self._asked = step, 0.0, 0.0
            return
        self._idle += elapsed
        lost = False
        if self._is_lost is not None and self._idle - self._asked >= _ASK:
            self._asked = self._idle
            lost = self._is_lost() and self._running == step
        if (lost or self._idle >= self.seconds) and not self.expired and self._manager is not None:
            self.expired = True
            self._manager.start_cancel()


def _watch(watched: weakref.ref[Watchdog], period: float) -> None:
    """Look at a watchdog until it is gone."""
    before = time.monotonic()
    while True:
        time.sleep(period)
        watchdog = watched()
        if watchdog is None:
            return
        now = time.monotonic()
        watchdog.look(now - before)
        before = now
        del watchdog
