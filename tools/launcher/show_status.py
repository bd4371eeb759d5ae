"""Look at jobs from outside: `launch --status` prints a table, `--metrics` answers Prometheus while a job runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from autograph_rewrite.tools.launcher.metrics import served
from autograph_rewrite.tools.launcher.status import JobStatus, StatusFolder, running


class ShowStatus(argparse.Action):
    """Prints the status of the jobs on this machine, and ends the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, value: Any, option: str | None = None
    ) -> None:
        """Print."""
        jobs, now = running(), time.time()
        if value == "json":
            print(json.dumps({"jobs": [job.data(now) for job in jobs]}))
        elif not jobs:
            print("no job of yours runs on this machine")
        for job in jobs if value != "json" else ():
            _print(job, now)
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
    with StatusFolder(script) as status, served(port, status.read) if port is not None else nullcontext():
        yield status


def _print(job: JobStatus, now: float) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{job.script}, launcher {job.pid}, {_span(now - job.began)}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("process", "steps", "examples", "examples/s", ""):
        table.add_column(name, justify="left" if name in ("process", "") else "right")
    for process in job.processes:
        table.add_row(process.name, *_numbers(process.progress), process.state(job.furthest, now))
    Console().print(table)


def _numbers(progress: Any) -> Sequence[str]:
    if not progress:
        return ("", "", "")
    return f"{progress['steps']:,}", f"{progress['examples']:,}", f"{progress['rate']:,.0f}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
