"""A profile that the environment asks for: the first thing that trains is traced for some steps, once per process.

`autograph-rewrite profile` sets AUTOGRAPH_REWRITE_PROFILE for each process that it starts, and reads their files:

    {"folder": "/tmp/x", "skip": 2, "steps": 5}   ->   /tmp/x/rank_0.json, /tmp/x/rank_1.json
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autograph_rewrite.cost.hardware.calibrate import calibrate
from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.runtime.tracing.prediction import prediction
from autograph_rewrite.runtime.tracing.tracer import Tracer
from autograph_rewrite.training_graph import RewrittenTrace

VARIABLE = "AUTOGRAPH_REWRITE_PROFILE"


def requested() -> RequestedProfile | None:
    """Return what observes steps, if the environment asks for a profile."""
    return RequestedProfile() if VARIABLE in os.environ else None


class RequestedProfile:
    """Observes the steps of one function or session; the first that runs one takes the request."""

    def __init__(self) -> None:
        self._request: Mapping[str, Any] | None = None
        self._tracer: Tracer | None = None
        self._seen = 0
        self._processes = 1

    @contextmanager
    def step(self, trace: RewrittenTrace, examples: int | None) -> Iterator[None]:
        """Run one step, and trace it if it is one of those that are asked for."""
        text = os.environ.pop(VARIABLE, None) if self._request is None else None
        if text is not None:
            self._request = json.loads(text)
        if self._request is None or self._seen >= self._request["skip"] + self._request["steps"]:
            yield
            return
        if self._seen == self._request["skip"]:
            self._tracer = Tracer()
            self._tracer.start()
            atexit.register(self._write)
        self._seen += 1
        if self._tracer is None:
            yield
            return
        with self._tracer.step(trace, examples):
            yield
        if self._seen == self._request["skip"] + self._request["steps"]:
            self._write()

    def _write(self) -> None:
        """End the trace, and leave it where it is asked for."""
        atexit.unregister(self._write)
        if self._tracer is None or self._request is None or not self._tracer.examples:
            return
        tracer, request, self._tracer = self._tracer, self._request, None
        found = tracer.stop()
        said: dict[str, Any] = {"trace": found.data(), "predicted": None, "notes": []}
        if found.rank == 0:
            report = tracer.traces[0].rewritten.report
            processes = len(report.plan.processes) if report is not None and not report.plan.is_driven else 1
            machine = calibrate() if request.get("calibrate") else None
            said["predicted"], said["notes"] = prediction(
                tracer.traces[0], (tracer.examples[0] or 0) * processes, machine
            )
        folder = Path(request["folder"])
        write_whole(folder / f"rank_{found.rank}.json", json.dumps(said).encode())
