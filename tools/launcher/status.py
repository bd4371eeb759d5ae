"""Read the status of jobs on this machine: each launcher has a folder, into which its processes write their progress.

    /run/user/1000/autograph-rewrite/4711/     of the launcher with this process id
      job.json                                 its script and start time
      worker-0/4715-1.json                     `runtime.job.progress`, written every second
      worker-0/saved.json                      its last snapshot or checkpoint

`launch --status` reads the folders of all running launchers; `launch --metrics PORT` answers Prometheus from the folder
of its job.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.runtime.job.progress import SAVED, VARIABLE
from autograph_rewrite.tools.launcher.process import libc, prepare

if TYPE_CHECKING:
    from rich.table import Table


STALE = 5.0
"""Seconds without a write after which a process counts as silent; it writes every second."""


@dataclass(frozen=True)
class ProcessStatus:
    """The progress of a process: that of its session, function or model that stepped last."""

    name: str
    progress: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return int(self.progress.get("steps", 0))

    def behind(self, furthest: int) -> int:
        """Return how many steps it has done less than the furthest process; 0 if it has not trained."""
        return furthest - self.steps if self.progress else 0

    def state(self, furthest: int, now: float) -> str:
        """Return its state in words.

        Args:
            furthest: the steps of the furthest process.
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
    """The last snapshot or checkpoint: kind, step and time; empty before the first."""

    @property
    def furthest(self) -> int:
        """The steps of the furthest process."""
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
    """The folder of one launcher; use it as a context manager."""

    def __init__(self, script: str) -> None:
        self._script = script
        self.path = _home() / str(os.getpid())

    def __enter__(self) -> StatusFolder:
        shutil.rmtree(self.path, ignore_errors=True)  # an earlier process had this id
        self.path.mkdir(mode=0o700, parents=True)
        (self.path / "job.json").write_text(json.dumps({"script": self._script, "began": time.time()}))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def environment(self, process: str) -> dict[str, str]:
        """Return the environment variable that names a process's folder; create the folder."""
        folder = self.path / process.replace(" ", "-")
        folder.mkdir(mode=0o700, exist_ok=True)
        return {VARIABLE: str(folder)}

    def keep_only(self, processes: Iterable[str]) -> None:
        """Remove the folders of all other processes."""
        known = {process.replace(" ", "-") for process in processes}
        for entry in self.path.iterdir():
            if entry.is_dir() and entry.name not in known:
                shutil.rmtree(entry, ignore_errors=True)

    def steps(self, process: str) -> int | None:
        """Return how many steps a process has done; None: it has written nothing."""
        found = max(_written(self.path / process.replace(" ", "-")), key=_when, default=None)
        return found["steps"] if found is not None else None


def running() -> list[JobStatus]:
    """Return the running jobs of this user on this machine, the oldest first; remove folders of dead launchers."""
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
    """Return the status of the job in a launcher's folder.

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
    """Return the JSON object in a file; empty if there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _written(folder: Path) -> Iterator[dict[str, Any]]:
    for file in folder.glob("[0-9]*.json"):  # begins with a process id; unfinished files begin with a dot
        with suppress(OSError, ValueError):
            yield json.loads(file.read_text(encoding="utf-8"))


def _when(progress: Mapping[str, Any]) -> float:
    return float(progress["changed"])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def _home() -> Path:
    """Return the folder of this user's jobs, which must belong to this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(runtime) / "autograph-rewrite" if runtime and os.access(runtime, os.W_OK) else None
    home = home or Path(tempfile.gettempdir()) / f"autograph-rewrite-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="autograph-rewrite-"))
    return home


# Show jobs: `launch --status` prints a table, `--metrics` answers Prometheus while a job runs.


class ShowStatus(argparse.Action):
    """Prints the status of the jobs on this machine, and ends the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, value: Any, option: str | None = None
    ) -> None:
        """Print the status."""
        jobs, now = running(), time.time()
        if value == "json":
            print(json.dumps({"jobs": [job.data(now) for job in jobs]}))
        else:
            from autograph_rewrite.inspect.table import drawn

            print(drawn(*(_table(job, now) for job in jobs)) if jobs else "no job of yours runs on this machine")
        parser.exit()


@contextmanager
def watched(script: str, port: int | None) -> Iterator[StatusFolder]:
    """Yield the folder into which the processes of a job write their progress.

    Args:
        port: the port that answers Prometheus; None: there is none.

    Raises:
        ClusterError: the port is taken.
    """
    with StatusFolder(script) as status, metrics_endpoint(port, status.path) if port is not None else nullcontext():
        yield status


def _table(job: JobStatus, now: float) -> Table:
    from autograph_rewrite.inspect.table import table

    rows = [(p.name, *_numbers(p.progress), p.state(job.furthest, now)) for p in job.processes]
    title = f"{job.script}, launcher {job.pid}, for {_span(now - job.began)}"
    if job.saved:
        title += f"; {job.saved['what']} of step {job.saved['step']:,}, {now - job.saved['at']:.0f} s ago"
    return table(title, ("process", "#steps", "#examples", "#examples/s", "state"), rows)


def _numbers(progress: Mapping[str, Any]) -> tuple[str, ...]:
    if not progress:
        return ("", "", "")
    return f"{progress['steps']:,}", f"{progress['examples']:,}", f"{progress['rate']:,.0f}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


# `launch --metrics PORT`: the progress of a job's processes in the text format of Prometheus, on loopback.
#
# autograph_rewrite_steps_total{process="worker 0"} 120

_METRICS = (
    ("steps_total", "counter", "Steps that are done.", "steps"),
    ("examples_total", "counter", "Examples in all steps, of this process.", "examples"),
    ("examples_per_second", "gauge", "Over the last ten seconds, of this process.", "rate"),
    ("in_step", "gauge", "Whether a step runs.", "in_step"),
    ("last_change_seconds", "gauge", "Unix time at which a step has last begun or ended.", "changed"),
    ("steps_behind", "gauge", "Steps that the first of all has done more.", "behind"),
)
_SAVED = (
    ("saved_step", "gauge", "Step after which the last snapshot or checkpoint was taken.", "step"),
    ("saved_time_seconds", "gauge", "Unix time at which it was there: time() less this is its age.", "at"),
)


def _numbers_of(process: ProcessStatus, furthest: int) -> dict[str, float]:
    said = process.progress
    return {**said, "in_step": int(said["in_step"]), "behind": process.behind(furthest)}


def text(job: JobStatus) -> str:
    """Return the metrics of a job."""
    progress = {p.name: _numbers_of(p, job.furthest) for p in job.processes if p.progress}
    saved = {job.saved["what"]: job.saved} if job.saved else {}
    lines = []
    for metrics, label, sources in ((_METRICS, "process", progress), (_SAVED, "what", saved)):
        for name, kind, meaning, key in metrics:
            full = f"autograph_rewrite_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
            lines += [f'{full}{{{label}="{source}"}} {said[key]}' for source, said in sources.items()]
    return "\n".join(lines) + "\n"


@contextmanager
def metrics_endpoint(port: int, folder: Path) -> Iterator[None]:
    """Answer at a loopback port during a block.

    A separate process answers, because the launcher forks and so must have only one thread.

    Raises:
        ClusterError: the port is taken.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as HTTP servers do
        try:
            listening.bind((LOOPBACK, port))
        except OSError as error:
            raise ClusterError(f"cannot use port {port} for metrics: {error.strerror}", hint="give another") from None
        listening.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno()), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            start_new_session=True,
            preexec_fn=functools.partial(prepare, os.getpid(), None, libc()),
        )
    try:
        yield
    finally:
        server.kill()
        server.wait()


def serve(listening: socket.socket, folder: Path) -> None:
    """Answer requests for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = text(read_status(folder)).encode() if found else b"the metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.serve_forever()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
