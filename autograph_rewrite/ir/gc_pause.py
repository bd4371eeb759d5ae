"""Pauses garbage collection while a graph is built: all of its objects are alive, so a collection frees nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the cyclic collector off, and on again if it was on.

    The new objects count as old afterwards: otherwise the next collection would traverse all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # unfreeze() would also undo the freeze of other code
                gc.freeze()
                gc.unfreeze()
            gc.enable()
