"""The folder of a job's checkpoints: one is there once it is whole, and what was left half-written is never taken.

    checkpoints/
      step-00000120/                  whole: put here under its name in one go, as the last act of writing it
        checkpoint.json               the step, what the program adds, bytes, SHA-256 of the index
        variables.index               for each variable: type, shape, where it is, CRC-32C of its bytes
        variables.data-0000?-of-0000? what each worker has written
      .step-00000130.3f2a-7/          being written: `part-0`, `part-1`, ...

The digest of the index and the checksums in it cover every byte; TensorFlow compares the latter as it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autograph_rewrite.diagnostics.files import read_whole
from autograph_rewrite.errors import CheckpointError

MANIFEST = "checkpoint.json"
PREFIX = "variables"
_NAME = re.compile(r"step-(\d{8,})")


class Damaged(CheckpointError):
    """A checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class Label:
    """What a program says of a checkpoint."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What it adds, as JSON."""
    steps_per_call: int = 0
    """How many of its steps one call makes, as far as its checkpoints have told; 0: they have not."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    bytes: int
    index: str
    """SHA-256 of `variables.index`."""
    sizes: Mapping[str, int]
    """Bytes of each file."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    steps_per_call: int = 0
    format: int = 1


_KINDS = {name: type(value) for name, value in vars(Manifest(0, 0, "", {})).items()}


@dataclass(frozen=True)
class CheckpointFolder:
    """Where the checkpoints of a job are."""

    path: Path

    def partial(self, step: int, token: str) -> Path:
        """Return where a checkpoint is while it is being written; nobody else has the token."""
        return self.path / f".{_name(step)}.{token}"

    def whole(self, step: int) -> Path:
        """Return where it is in the end."""
        return self.path / _name(step)

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if (entry / MANIFEST).is_file())
        return sorted((int(match[1]) for match in found if match is not None), reverse=True)

    def commit(self, partial: Path, label: Label) -> None:
        """Make a checkpoint whose files are all there a whole one; one of the same step is replaced.

        Args:
            partial: where it was written.
            label: what the program says of it.
        """
        files = sorted(file for file in partial.iterdir() if file.name.startswith(f"{PREFIX}."))
        sizes = {file.name: file.stat().st_size for file in files}
        manifest = Manifest(
            bytes=sum(sizes.values()), index=_digest(partial / f"{PREFIX}.index"), sizes=sizes, **vars(label)
        )
        written = partial / MANIFEST
        written.write_text(json.dumps(vars(manifest), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for file in (*files, written, partial):
            _sync(file)
        target, old = self.whole(label.step), self.partial(label.step, "replaced")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(partial, target)
        _sync(self.path)
        shutil.rmtree(old, ignore_errors=True)

    def manifest(self, step: int) -> Manifest:
        """Return what a checkpoint says of itself, once its files have been looked at.

        Raises:
            Damaged: a file is missing, shorter or longer than it was, or the index has changed.
        """
        folder = self.whole(step)
        try:
            manifest = Manifest(**json.loads(read_whole(folder / MANIFEST, "text")))
            sizes = {name: (folder / name).stat().st_size for name in manifest.sizes}
            kinds = {name: type(value) for name, value in vars(manifest).items()}
            if kinds != _KINDS:
                raise TypeError(f"{MANIFEST} has other fields")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise Damaged(f"the checkpoint {folder} is damaged: {error}") from None
        changed = [name for name, size in manifest.sizes.items() if sizes[name] != size]
        if not changed and _digest(folder / f"{PREFIX}.index") != manifest.index:
            changed = [f"{PREFIX}.index"]
        if changed:
            raise Damaged(f"the checkpoint {folder} is damaged: {changed[0]} is not what was written")
        return manifest

    def prune(self, keep: int) -> None:
        """Remove all but the newest checkpoints."""
        for step in self.steps()[keep:]:
            gone = self.partial(step, "removed")
            os.replace(self.whole(step), gone)  # it is gone in one go, too
            shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed processes have left half-written."""
        for folder in self._unfinished():
            shutil.rmtree(folder, ignore_errors=True)

    def _unfinished(self) -> Iterator[Path]:
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if re.fullmatch(r"\.step-\d{8,}\..+", entry.name):
                yield entry


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _digest(file: Path) -> str:
    return hashlib.sha256(read_whole(file)).hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
