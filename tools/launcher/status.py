"""The status of jobs on this machine: each launcher has a folder, in which its processes write how far they have come.

    /run/user/1000/autograph-rewrite/4711/     of the launcher with this process id
      job.json                                 what it runs, since when
      worker-0/4715-1.json                     `runtime.job.progress`, written every second
      worker-0/saved.json                      what it has saved last

`launch --status` reads the folders of all that run; `launch --metrics PORT` hands out its own to Prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autograph_rewrite.runtime.job.progress import SAVED, VARIABLE

STALE = 5.0
"""Seconds without a writing after which a process counts as silent; it writes every second."""


@dataclass(frozen=True)
class ProcessStatus:
    """How far a process has come. Its progress is that of what has stepped last."""

    name: str
    progress: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return int(self.progress.get("steps", 0))

    def behind(self, furthest: int) -> int:
        """Return how many steps less than the first of all it has done; 0 for one that has not trained."""
        return furthest - self.steps if self.progress else 0

    def state(self, furthest: int, now: float) -> str:
        """Return what it does, in words.

        Args:
            furthest: the steps that the first of all has done.
            now: by `time.time`.
        """
        if not self.progress:
            return "has not trained yet"
        silent, since = now - self.progress["written"], now - self.progress["changed"]
        if silent > STALE:
            return f"silent for {silent:.0f} s"
        said = f"in a step for {since:.1f} s" if self.progress["in_step"] else f"between steps for {since:.1f} s"
        behind = self.behind(furthest)
        return f"{said}, {behind} behind" if behind > 1 else said


@dataclass(frozen=True)
class JobStatus:
    """One job on this machine."""

    pid: int
    script: str
    began: float
    processes: Sequence[ProcessStatus]
    saved: Mapping[str, Any] = field(default_factory=dict)
    """What was saved last: "snapshot" or "checkpoint", behind which step, when; nothing before the first."""

    @property
    def furthest(self) -> int:
        """The steps that the first of all has done."""
        return max((process.steps for process in self.processes), default=0)

    def data(self, now: float) -> dict[str, Any]:
        """Return it as plain data."""
        processes = [
            {**asdict(p), "state": p.state(self.furthest, now), "behind": p.behind(self.furthest)}
            for p in self.processes
        ]
        saved = {**self.saved, "age": round(now - self.saved["at"], 3)} if self.saved else None
        return {"pid": self.pid, "script": self.script, "began": self.began, "saved": saved, "processes": processes}


class StatusFolder:
    """The folder of one launcher; use it as a context manager.

    Args:
        script: what it runs.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self.path = _home() / str(os.getpid())

    def __enter__(self) -> StatusFolder:
        shutil.rmtree(self.path, ignore_errors=True)  # of an earlier process with this id
        self.path.mkdir(mode=0o700, parents=True)
        (self.path / "job.json").write_text(json.dumps({"script": self._script, "began": time.time()}))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def environment(self, process: str) -> dict[str, str]:
        """Return what a process finds in its environment."""
        folder = self.path / process.replace(" ", "-")
        folder.mkdir(mode=0o700, exist_ok=True)
        return {VARIABLE: str(folder)}

    def keep_only(self, processes: Iterable[str]) -> None:
        """Forget processes that a start of the job does not have any more."""
        known = {process.replace(" ", "-") for process in processes}
        for entry in self.path.iterdir():
            if entry.is_dir() and entry.name not in known:
                shutil.rmtree(entry, ignore_errors=True)

    def steps(self, process: str) -> int | None:
        """Return how many steps a process has done; None: it does not say."""
        found = max(_written(self.path / process.replace(" ", "-")), key=_when, default=None)
        return found["steps"] if found is not None else None


def running() -> list[JobStatus]:
    """Return the jobs of this user that run on this machine, the oldest first; what dead launchers left is removed."""
    found = []
    for folder in _home().iterdir():
        if not folder.name.isdecimal():
            continue
        if _is_alive(int(folder.name)):
            with suppress(OSError, ValueError):
                found.append(read_status(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(found, key=lambda job: job.began)


def read_status(folder: Path) -> JobStatus:
    """Return the status of the job whose launcher has a folder.

    Args:
        folder: the launcher's.

    Raises:
        OSError: the job has ended.
    """
    said = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    processes = [
        ProcessStatus(entry.name.replace("-", " "), max(_written(entry), key=_when, default={}))
        for entry in sorted(folder.iterdir(), key=lambda entry: (not entry.name.startswith("worker"), entry.name))
        if entry.is_dir()
    ]
    saved = max((_json(entry / SAVED) for entry in folder.iterdir()), key=lambda said: said.get("at", 0.0), default={})
    return JobStatus(int(folder.name), str(said["script"]), float(said["began"]), processes, saved)


def _json(path: Path) -> dict[str, Any]:
    """Return what a file says; nothing where there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _written(folder: Path) -> Iterator[dict[str, Any]]:
    for file in folder.glob("[0-9]*.json"):  # by process; others begin with a dot, and are half-written
        with suppress(OSError, ValueError):
            yield json.loads(file.read_text(encoding="utf-8"))


def _when(progress: Mapping[str, Any]) -> float:
    return float(progress["changed"])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _home() -> Path:
    """Return the folder of this user's jobs, which nobody else can have made."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(runtime) / "autograph-rewrite" if runtime and os.access(runtime, os.W_OK) else None
    home = home or Path(tempfile.gettempdir()) / f"autograph-rewrite-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="autograph-rewrite-"))
    return home
