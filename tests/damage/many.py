"""Many cases in a process of their own, which is started again when one takes it down or does not end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BAD = frozenset(("memory", "traceback", "slow", "written", "controls", "died", "hang"))
PATIENCE = 30.0
"""Seconds on the wall after which a case has hung; on a busy machine the processor's time is what is judged."""
MOST = 1000
"""Cases of one process: what TensorFlow keeps of each does not add up."""
START = 300.0


def run_many(cases: Iterable[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield what came of each case.

    Args:
        cases: format and seed of each.
    """
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder, _Worker(Path(folder)) as worker:
            for _ in range(min(MOST, len(left))):
                name, seed = left.pop(0)
                found = worker.ask({"format": name, "seed": seed})
                yield found
                if found["outcome"] in ("died", "hang"):
                    break


class _Worker:
    def __init__(self, folder: Path) -> None:
        self._log = (folder / "log").open("w+")
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.damage.worker", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> _Worker:
        if self._answer(START) is None:
            raise RuntimeError(f"the worker does not start: {self._said()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, or how the process ended."""
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        found = self._answer(PATIENCE)
        if found is not None:
            return found if found["outcome"] != "slow" else {**found, "trace": self._said()}
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = None
        outcome = "hang" if code is None else "died"
        by = "" if code is None or code >= 0 else signal.Signals(-code).name
        return {**case, "outcome": outcome, "seconds": PATIENCE, "cpu": 0.0, "said": f"{by} {self._said()}"}

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def _said(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")[-3000:]
