"""Large files leave the page cache as they are written, so that the steps beside keep their cores and memory.

    SaveV2 ──► pages ──► disk          each 64 MiB: what is written goes to the disk, its pages are given back
               └── given back, and taken again for what comes next

Without it a checkpoint fills fresh memory with what nobody will read soon, and the system looks for that memory, clears
it and writes it back in the time of the steps: on a virtual machine that is most of what writing costs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CAN = hasattr(os, "posix_fadvise") and hasattr(os, "fdatasync")
_LOOK = 0.01
_ENOUGH = 2**26
"""Bytes that are written back at once."""


@contextmanager
def kept_small(prefix: Path) -> Iterator[None]:
    """Keep files out of the page cache while the block writes them.

    Args:
        prefix: with which their names begin.
    """
    if not _CAN:
        yield
        return
    over = threading.Event()
    drain = threading.Thread(target=_drain, args=(prefix, over), name="checkpoint_drain", daemon=True)
    drain.start()
    try:
        yield
    finally:
        over.set()
        drain.join()


def _drain(prefix: Path, over: threading.Event) -> None:
    be_patient()
    drained: dict[Path, int] = {}
    while not over.wait(_LOOK):
        for file in prefix.parent.glob(f"{prefix.name}.data-*"):
            with suppress(OSError):  # it has another name by now
                size = file.stat().st_size
                if size - drained.get(file, 0) >= _ENOUGH:
                    _write_back(file)
                    drained[file] = size


def _write_back(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def be_patient() -> None:
    """Let this thread run where others leave a core idle, rather than take its share of them."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
