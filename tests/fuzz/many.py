"""Many seeds in a few processes: one that hangs or dies is recorded, its process replaced, and the rest goes on.

Outcomes are appended to a file of JSON lines as they come; what stands there already is not run again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import worker
from tests.support.supervised import NoAnswerError, Process

LIMIT_SECONDS = 150.0
START_SECONDS = 300.0
SEEDS_PER_PROCESS = 250
MEMORY_KB = 3_000_000


def _started() -> Process:
    return Process(worker.serve, start=START_SECONDS, limit=LIMIT_SECONDS, memory=MEMORY_KB)


def _outcome(process: Process, seed: int) -> dict[str, Any]:
    """Return the outcome of a seed; the process is gone afterwards if it hung or died."""
    try:
        return process.ask(seed)
    except NoAnswerError as error:
        return {"seed": seed, "outcome": "hang" if error.hung else "crash", "reason": str(error)}


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
            process = _started()
        outcome = _outcome(process, seed)
        with lock:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")
            if outcome["outcome"] in ("wrong", "crash", "hang"):
                say(f"{seed}: {outcome['outcome']}: {outcome['reason']}")
        if process.is_full or process.done >= SEEDS_PER_PROCESS:
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
