"""Write how far this process has come to a small file, every second, for other processes to read.

`autograph-rewrite launch` names a folder for each process in AUTOGRAPH_REWRITE_STATUS. Each function, session and model
that steps writes a file there:

    {"task": 1, "steps": 120, "examples": 7680, "rate": 812.5, "in_step": true, "changed": 1768.2, "written": 1769.0}

`saved.json` names the last save from which the job can go on: {"what": "snapshot", "step": 120, "at": 1766.1}
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.runtime.job.background_thread import repeat

if TYPE_CHECKING:
    from autograph_rewrite.training_graph import RewrittenTrace


VARIABLE = "AUTOGRAPH_REWRITE_STATUS"
SAVED = "saved.json"
_PERIOD = 1.0
"""Seconds from one writing to the next."""
_WINDOW = 10
"""Number of these periods over which the rate is averaged."""


class ProgressReport:
    """Observes steps, and writes how far they have come."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}-{id(self)}.json"
        self._task = self._steps = self._examples = 0
        self._in_step, self._changed = False, 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._is_running = False

    @contextmanager
    def step(self, trace: RewrittenTrace, examples: int | None) -> Iterator[None]:
        """Count one step, once it is done.

        Args:
            examples: in this process's part of the batch; None if unknown.
        """
        if not self._is_running:
            report = trace.rewritten.report
            self._task = (report.task or 0) if report is not None else 0
            self._is_running = True
            repeat(self._write, _PERIOD)
        self._in_step, self._changed = True, time.time()
        try:
            yield
            self._steps, self._examples = self._steps + 1, self._examples + (examples or 0)
        finally:
            self._in_step, self._changed = False, time.time()

    def _now(self) -> dict[str, object]:
        """Return how far the steps have come. Times are those of `time.time`, in seconds."""
        now = time.time()
        self._seen.append((now, self._examples))
        before, examples = self._seen[0]
        return {
            "task": self._task,
            "steps": self._steps,  # calls: with `steps_per_run` each makes several steps
            "examples": self._examples,  # of this process, in all calls
            "rate": (self._examples - examples) / (now - before) if now > before else 0.0,
            "in_step": self._in_step,
            "changed": self._changed,  # when a step has last begun or ended
            "written": now,
        }

    def _write(self) -> bool:
        with suppress(OSError):  # the launcher, which owns the folder, has ended
            write_whole(self._path, json.dumps(self._now()).encode())
        return self._path.parent.is_dir()


def note_saved(what: str, step: int) -> None:
    """Tell the launcher that something was saved from which the job can go on.

    Args:
        what: "snapshot" or "checkpoint".
    """
    if os.environ.get(VARIABLE):
        told = json.dumps({"what": what, "step": step, "at": time.time()}).encode()
        with suppress(OSError):  # the launcher has ended
            write_whole(Path(os.environ[VARIABLE]) / SAVED, told)


def requested() -> ProgressReport | None:
    """Return an observer of steps if the environment names a folder for its file."""
    return ProgressReport(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else None
