"""Run a function periodically in a background thread, which leaves TensorFlow and gRPC before the interpreter exits.

If the interpreter exits while a thread is in C++ code, the process aborts with SIGABRT.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

_PATIENCE = 10.0
"""Seconds that the end of the program waits for the thread."""


def repeat(act: Callable[[], bool], period: float) -> threading.Thread:
    """Call `act` again and again in a new thread, until it returns False or the program ends.

    Args:
        period: seconds to wait before each call.
    """
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(period) and act():
            pass
        if not ends.is_set():
            atexit.unregister(finish)

    def finish() -> None:
        ends.set()
        thread.join(_PATIENCE)

    thread = threading.Thread(target=run, daemon=True)
    atexit.register(finish)
    thread.start()
    return thread
