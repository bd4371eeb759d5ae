"""Hear signals that ask a process to end, also while its main thread is in TensorFlow, where Python hears nothing.

    SIGTERM ──► Python's handler in C ──► a pipe (signal.set_wakeup_fd) ──► a thread ──► told(15)

A Python handler runs between two instructions of the main thread: only after the step, or never if the step waits for a
process that has died. Signals that are ignored (nohup), or that the program handles by itself, are left alone.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from autograph_rewrite.errors import ConfigError

GRACE = "AUTOGRAPH_GRACE"
"""The environment variable with the seconds from the signal to the kill."""
DEFAULT_GRACE = 25.0
"""Seconds where the variable is not set: Kubernetes and SLURM kill after 30."""
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def grace(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds there are from the signal to the kill.

    Raises:
        ConfigError: the variable is no positive, finite number.
    """
    text = environ.get(GRACE) or str(DEFAULT_GRACE)
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ConfigError(f"{GRACE} is '{text}', which is no number of seconds")


def listen(told: Callable[[int], None]) -> bool:
    """Call `told`, in a thread, for every signal that asks this process to end; return whether any can be heard."""
    if threading.current_thread() is not threading.main_thread():
        return False
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in ASKING if (handler := signal.getsignal(number)) in defaults}
    if not before:
        return False
    read, write = os.pipe()
    os.set_blocking(write, False)
    others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if others != -1:  # asyncio's: `handle` writes the number, when Python calls it
        signal.set_wakeup_fd(others)

    def handle(number: int, _: object) -> None:
        if others != -1:
            os.write(write, bytes([number]))

    for number in before:
        signal.signal(number, handle)

    def forget() -> None:
        """Restore the handlers in a forked process: its signals must not reach the pipe, which its parent reads."""
        if others == -1:
            signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)
        let(signal.SIG_UNBLOCK)

    def let(how: int) -> None:
        signal.pthread_sigmask(how, before)

    # Signals to a child are blocked until `forget` has run in it.
    block, unblock = functools.partial(let, signal.SIG_BLOCK), functools.partial(let, signal.SIG_UNBLOCK)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)

    def hear() -> None:
        while data := os.read(read, 1):
            if data[0] in before:
                told(data[0])

    threading.Thread(target=hear, name="autograph_signals", daemon=True).start()
    return True


def name_of_signal(number: int) -> str:
    """Return `SIGTERM` for 15."""
    return signal.Signals(number).name
