"""Look at jobs from outside: `launch --status` prints a table, `--metrics` answers Prometheus while a job runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograph_rewrite.tools.launcher.status import JobStatus, StatusFolder, running

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
            from autograph_rewrite.inspect.render.table import drawn

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
    from autograph_rewrite.tools.launcher.metrics import metrics_endpoint  # an HTTP server, for those who ask for one

    return metrics_endpoint(port, folder)


def _table(job: JobStatus, now: float) -> Table:
    from autograph_rewrite.inspect.render.table import table

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
