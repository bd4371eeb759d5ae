"""`launch --metrics PORT`: the progress of a job's processes in the text format of Prometheus, on loopback.

autograph_rewrite_steps_total{process="worker 0"} 120
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.tools.launcher.status import JobStatus

_METRICS = (
    ("steps_total", "counter", "Steps that are done.", lambda p: p["steps"]),
    ("examples_total", "counter", "Examples in all steps, of this process.", lambda p: p["examples"]),
    ("examples_per_second", "gauge", "Over the last ten seconds, of this process.", lambda p: p["rate"]),
    ("in_step", "gauge", "Whether a step runs.", lambda p: int(p["in_step"])),
    ("last_change_seconds", "gauge", "Unix time at which a step has last begun or ended.", lambda p: p["changed"]),
)


def text(job: JobStatus) -> str:
    """Return the metrics of a job."""
    lines = []
    for name, kind, meaning, value in _METRICS:
        full = f"autograph_rewrite_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
        lines += [f'{full}{{process="{p.name}"}} {value(p.progress)}' for p in job.processes if p.progress]
    return "\n".join(lines) + "\n"


@contextmanager
def metrics_endpoint(port: int, read: Callable[[], JobStatus]) -> Iterator[None]:
    """Answer at a port of this machine, for nobody outside of it.

    Args:
        port: where.
        read: gives the status.

    Raises:
        ClusterError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = text(read()).encode() if found else b"the metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal is the job's."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise ClusterError(f"cannot use port {port} for metrics: {error.strerror}", hint="give another") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
