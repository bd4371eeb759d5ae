"""`launch --metrics PORT`: the progress of a job's processes in the text format of Prometheus, on loopback.

autograph_rewrite_steps_total{process="worker 0"} 120
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.tools.launcher.process import libc, prepare
from autograph_rewrite.tools.launcher.status import JobStatus, read_status

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
