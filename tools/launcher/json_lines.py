"""`launch --log-format json`: each line of a process as an object, with who wrote it, when, and in which step.

{"time": "2026-11-23T22:15:04.120Z", "process": "worker 1", "stream": "stderr", "steps": 118, "text": "loss 0.3"}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timezone

from autograph_rewrite.tools.launcher.output import Form
from autograph_rewrite.tools.launcher.status import StatusFolder

_FRESH = 1.0
"""Seconds after which the number of steps is looked up again; processes write it as often."""


def json_lines(status: StatusFolder) -> Callable[[str, str], Form]:
    """Return what makes the form of the lines that a process writes to a stream.

    Args:
        status: of the job.
    """

    def of(process: str, stream: str) -> Form:
        steps, looked = None, float("-inf")

        def form(line: bytes) -> bytes:
            nonlocal steps, looked
            if time.monotonic() - looked > _FRESH:
                steps, looked = status.steps(process), time.monotonic()
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            text = line.decode("utf-8", errors="replace")
            entry = {"time": now, "process": process, "stream": stream, "steps": steps, "text": text}
            return json.dumps(entry, ensure_ascii=False).encode()

        return form

    return of
