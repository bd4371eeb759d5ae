"""Files that are written for a checkpoint leave the page cache as they grow."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path
from queue import Queue

import pytest

from autograph_rewrite.runtime import checkpoints


def cached(file: Path) -> float:
    """Return the share of a file that is in the page cache."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), found) == 0
        share = sum(one & 1 for one in found) / pages
        del start
    return share


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no way to say it")
def test_what_is_written_back_leaves_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "part-0.data-00000-of-00001"
    file.write_bytes(bytes(2**22))
    before = cached(file)
    checkpoints._write_back(file)
    assert cached(file) < 0.1 < 0.9 < before


def test_a_file_is_written_back_again_and_again_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Queue[int] = Queue()
    monkeypatch.setattr(checkpoints, "_CAN", True)
    monkeypatch.setattr(checkpoints, "_ENOUGH", 1000)
    monkeypatch.setattr(checkpoints, "be_patient", lambda: None)
    monkeypatch.setattr(checkpoints, "_write_back", lambda file: found.put(file.stat().st_size))
    with checkpoints.kept_small(tmp_path / "part-0"), (tmp_path / "part-0.data-x").open("wb", buffering=0) as file:
        (tmp_path / "part-1.data-x").write_bytes(bytes(5000))  # of another worker
        for size in (1000, 2000):
            file.write(bytes(1000))
            assert found.get(timeout=60) == size
        file.write(bytes(999))
    assert found.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint_drain"]
