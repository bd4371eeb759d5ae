"""One checkpoint being written by all workers, beside the steps: files say who is done, so that no step waits.

worker 1   part-1.index, part-1.data-...   then `part-1.done`
worker 0   its own part, then looks for those of all, joins them, and puts the checkpoint in its place
worker 1   until the folder is gone from where it was being written, or `failed` stands in it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.errors import CheckpointError, ClusterError
from autograph_rewrite.runtime.checkpoints.bundle import merge_parts, write_part
from autograph_rewrite.runtime.checkpoints.deal import Piece
from autograph_rewrite.runtime.checkpoints.folder import PREFIX, CheckpointFolder, Label
from autograph_rewrite.runtime.failures.liveness import listed

_LOOK = 0.02
"""Seconds between looks at what the others have written."""
_FAILED = "failed"


@dataclass(frozen=True)
class JointSave:
    """One save of a job.

    Args:
        folder: where the checkpoints are.
        partial: where this one is while it is being written: of all workers the same, and of no other save.
        label: what the program says of it; that of worker 0 counts.
        task: which worker this is.
        workers: their names, for messages.
        seconds: how long to wait for the others.
    """

    folder: CheckpointFolder
    partial: Path
    label: Label
    task: int
    workers: Sequence[str]
    seconds: float

    def run(self, pieces: Sequence[Piece], values: Mapping[str, Any]) -> None:
        """Write this worker's part, and come back when the checkpoint is whole.

        Args:
            pieces: what this worker writes.
            values: whole values of the variables that these are of, by name.

        Raises:
            CheckpointError: somebody could not write.
            ClusterError: somebody does not.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            if pieces:
                write_part(self.partial / f"part-{self.task}", pieces, values)
            self._say(f"part-{self.task}.done", "part" if pieces else "")
            if self.task == 0:
                self._join()
        except (OSError, CheckpointError, ClusterError) as error:
            self._say(_FAILED, f"{self.workers[self.task]}: {error}")
            raise
        if self.task != 0:
            self._until(lambda: not self.partial.exists(), lambda: [self.workers[0]])

    def _join(self) -> None:
        done = [self.partial / f"part-{task}.done" for task in range(len(self.workers))]
        self._until(
            lambda: all(file.exists() for file in done),
            lambda: [name for name, file in zip(self.workers, done, strict=True) if not file.exists()],
        )
        parts = [file.with_suffix("") for file in done if file.read_text(encoding="utf-8")]
        merge_parts(parts, self.partial / PREFIX)
        for file in done:
            file.unlink()
        self.folder.commit(self.partial, self.label)

    def _until(self, is_done: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        """Wait for the others.

        Raises:
            CheckpointError: somebody has failed.
            ClusterError: somebody takes too long.
        """
        deadline = time.monotonic() + self.seconds
        while not is_done():
            failed = self.partial / _FAILED
            if failed.exists():
                raise CheckpointError(f"step {self.label.step} was not saved: {failed.read_text(encoding='utf-8')}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{listed(missing())} has not written its part of the checkpoint of step {self.label.step} "
                    f"within {self.seconds:g} s",
                    hint=f"is {self.folder.path} on a file system that all workers share, and do all of them save "
                    "after the same steps?",
                )
            time.sleep(_LOOK)

    def _say(self, name: str, text: str) -> None:
        """Leave a note for the others, whole from the moment that they see it."""
        try:
            write_whole(self.partial / name, text.encode())
        except OSError:
            if name != _FAILED:  # where nothing can be written they find out by themselves
                raise
