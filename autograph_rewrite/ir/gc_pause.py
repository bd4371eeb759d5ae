"""Pause garbage collection while a graph is built: all of its objects live, so a collection finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the cyclic collector off, and on again if it was on.

    What was built counts as old afterwards: otherwise the next allocation would walk through all of it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # nobody else has frozen objects, so nothing is undone
                gc.freeze()
                gc.unfreeze()
            gc.enable()
