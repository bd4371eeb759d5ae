"""Many seeds in a few processes: one that hangs or dies is recorded, its process replaced, and the rest goes on.

Outcomes are appended to a file of JSON lines as they come; what stands there already is not run again.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import worker

LIMIT_SECONDS = 150.0
START_SECONDS = 300.0
SEEDS_PER_PROCESS = 250
MEMORY_KB = 3_000_000


class Process:
    """One worker."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=worker.serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.done, self.is_full = 0, False
        if not self._pipe.poll(START_SECONDS):
            raise RuntimeError("a worker did not start")
        self._pipe.recv()

    def run(self, seed: int) -> dict[str, Any]:
        """Return the outcome of a seed; the process is gone afterwards if it hung or died."""
        try:
            self._pipe.send(seed)
            if not self._pipe.poll(LIMIT_SECONDS):
                self.end()
                return {"seed": seed, "outcome": "hang", "reason": f"no end after {LIMIT_SECONDS:.0f} s"}
            outcome, memory = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.end()
            return {"seed": seed, "outcome": "crash", "reason": f"the process died: exit code {code}"}
        self.done += 1
        self.is_full = self.done >= SEEDS_PER_PROCESS or memory > MEMORY_KB
        found: dict[str, Any] = outcome
        return found

    def end(self) -> None:
        """Kill the process."""
        self.is_full = True
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run_many(seeds: Iterable[int], workers: int, out: Path, say: Any = print) -> list[dict[str, Any]]:
    """Run seeds that `out` does not have yet; return all outcomes in it.

    Args:
        seeds: to run.
        workers: how many processes.
        out: a file of JSON lines, made or continued.
        say: called with a line about every bad outcome.
    """
    known = {line["seed"] for line in read(out)} if out.exists() else set()
    left = iter([seed for seed in seeds if seed not in known])
    lock = threading.Lock()
    threads = [threading.Thread(target=_work, args=(left, lock, out, say), daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return read(out)


def _work(left: Iterator[int], lock: threading.Lock, out: Path, say: Any) -> None:
    process: Process | None = None
    while True:
        with lock:
            seed = next(left, None)
        if seed is None:
            break
        if process is None:
            process = Process()
        outcome = process.run(seed)
        with lock:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")
            if outcome["outcome"] in ("wrong", "crash", "hang"):
                say(f"{seed}: {outcome['outcome']}: {outcome['reason']}")
        if process.is_full:
            process.end()
            process = None
    if process is not None:
        process.end()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the outcomes in a file, the last of each seed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted(
        {(line := json.loads(text))["seed"]: line for text in lines if text}.values(), key=lambda o: o["seed"]
    )
