"""Look at jobs from outside: `launch --status` prints a table, `--metrics` answers Prometheus while a job runs."""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.tools.launcher.process import libc, prepare
from autograph_rewrite.tools.launcher.status import JobStatus, StatusFolder, read_status, running

if TYPE_CHECKING:
    from rich.table import Table


class ShowStatus(argparse.Action):
    """Prints the status of the jobs on this machine, and ends the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, value: Any, option: str | None = None
    ) -> None:
        """Print."""
        jobs, now = running(), time.time()
        if value == "json":
            print(json.dumps({"jobs": [job.data(now) for job in jobs]}))
        else:
            from autograph_rewrite.inspect.table import drawn

            print(drawn(*(_table(job, now) for job in jobs)) if jobs else "no job of yours runs on this machine")
        parser.exit()


@contextmanager
def watched(script: str, port: int | None) -> Iterator[StatusFolder]:
    """Give the folder in which the processes of a job write how far they have come.

    Args:
        script: what they run.
        port: where to answer Prometheus; None: nowhere.

    Raises:
        ClusterError: the port is taken.
    """
    with StatusFolder(script) as status, _endpoint(port, status.path) if port is not None else nullcontext():
        yield status


def _endpoint(port: int, folder: Path) -> AbstractContextManager[None]:

    return metrics_endpoint(port, folder)


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
    ("steps_total", "counter", "Steps that are done.", lambda p: p["steps"]),
    ("examples_total", "counter", "Examples in all steps, of this process.", lambda p: p["examples"]),
    ("examples_per_second", "gauge", "Over the last ten seconds, of this process.", lambda p: p["rate"]),
    ("in_step", "gauge", "Whether a step runs.", lambda p: int(p["in_step"])),
    ("last_change_seconds", "gauge", "Unix time at which a step has last begun or ended.", lambda p: p["changed"]),
)


_SAVED = (
    ("saved_step", "step", "Step after which the last snapshot or checkpoint was taken."),
    ("saved_time_seconds", "at", "Unix time at which it was there: time() less this is its age."),
)


def text(job: JobStatus) -> str:
    """Return the metrics of a job."""
    lines = []
    for name, kind, meaning, value in _METRICS:
        full = f"autograph_rewrite_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
        lines += [f'{full}{{process="{p.name}"}} {value(p.progress)}' for p in job.processes if p.progress]
    full = "autograph_rewrite_steps_behind"
    lines += [f"# HELP {full} Steps that the first of all has done more.", f"# TYPE {full} gauge"]
    lines += [f'{full}{{process="{p.name}"}} {p.behind(job.furthest)}' for p in job.processes if p.progress]
    for name, key, meaning in _SAVED:
        full = f"autograph_rewrite_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} gauge"]
        lines += [f'{full}{{what="{job.saved["what"]}"}} {job.saved[key]}'] if job.saved else []
    return "\n".join(lines) + "\n"


@contextmanager
def metrics_endpoint(port: int, folder: Path) -> Iterator[None]:
    """Answer at a port of this machine, for nobody outside of it.

    A process of its own does: the launcher has one thread only, as it forks.

    Args:
        folder: of the job's status.

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
    """Answer without end.

    Args:
        listening: bound, and listening.
        folder: of the job's status.
    """

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
