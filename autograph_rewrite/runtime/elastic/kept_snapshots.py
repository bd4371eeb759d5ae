"""The folder in which an elastic job that has not come to its end leaves its snapshots, for the next one to go on from.

    launch --elastic 2:4 --snapshot-dir kept train.py     SIGTERM ─► the last snapshot ─► kept/000001/loop.npz, seed
    the same command                                      begins at that step; at its end kept/ is empty

A folder is written under another name and renamed, so what is there is whole; only then the one before it is removed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from autograph_rewrite.errors import ConfigError

_COMING = ".coming"


class KeptSnapshots:
    """The folder.

    Args:
        path: where it is; it is made if need be.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {path}: {error.strerror}", where="--snapshot-dir") from None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"the folder {path} cannot be written", where="--snapshot-dir")

    def restore(self, memory: Path) -> bool:
        """Copy what an earlier job has left into the memory of this one; return whether there was anything.

        Args:
            memory: the folder of this job's memory.
        """
        whole = self._whole()
        if not whole:
            return False
        for file in whole[-1].iterdir():
            shutil.copyfile(file, memory / file.name)
        return True

    def keep(self, memory: Path) -> bool:
        """Keep the snapshots of a job that has ended before its end, if it has taken any; return whether it has.

        Args:
            memory: the folder of its memory.
        """
        snapshots = [file for file in memory.glob("*.npz") if not file.name.startswith(("new-", "coming-"))]
        if not snapshots:
            return False
        before = self._whole()
        number = int(before[-1].name) + 1 if before else 1
        coming = self._path / f"{number:06}{_COMING}"
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir(mode=0o700)
        for file in (*snapshots, memory / "seed"):
            shutil.copyfile(file, coming / file.name)
        coming.rename(self._path / f"{number:06}")
        self._remove(before)
        return True

    def clear(self) -> None:
        """Remove what is kept: the job has come to its end."""
        self._remove([*self._whole(), *self._path.glob(f"*{_COMING}")])

    def _whole(self) -> list[Path]:
        """Return what is kept, the newest last."""
        return sorted(entry for entry in self._path.iterdir() if entry.name.isdecimal() and entry.is_dir())

    def _remove(self, entries: list[Path]) -> None:
        for entry in entries:
            shutil.rmtree(entry, ignore_errors=True)
