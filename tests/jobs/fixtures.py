"""Fixtures for jobs of several processes: a nursery for quick ones, and results that all test processes share."""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.jobs.nursery import Nursery, Worker

Once = Callable[[str, Callable[[Path], None]], Path]


def free_ports(count: int) -> list[int]:
    """Return ports at which nobody listens, outside of the range that outgoing connections take theirs from."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def tf_config(addresses: Sequence[str], task: int) -> str:
    """Return TF_CONFIG of one worker."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": task}})


class Jobs:
    """Starts workers, and ends whoever is left.

    Args:
        nursery: forks them.
        folder: where their output goes.
    """

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.folder = folder
        self._nursery = nursery
        self._workers: list[Worker] = []

    def start(self, *argv: object, environ: Mapping[str, str] | None = None) -> Worker:
        """Start one process."""
        log = self.folder / f"process_{len(self._workers)}.log"
        worker = self._nursery.start([str(arg) for arg in argv], log, {"TF_CPP_MIN_LOG_LEVEL": "1", **(environ or {})})
        self._workers.append(worker)
        return worker

    def job(self, count: int, *argv: object, environ: Mapping[str, str] | None = None) -> list[Worker]:
        """Start the workers of one job."""
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        environs = [{**(environ or {}), "TF_CONFIG": tf_config(addresses, task)} for task in range(count)]
        return [self.start(*argv, environ=each) for each in environs]

    def end(self) -> None:
        """Kill whoever is left."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            assert worker.wait(10) is not None


def ended(workers: Sequence[Worker], seconds: float) -> list[int | None]:
    """Wait until all have ended; return how they did, None for one that still runs."""
    deadline = time.monotonic() + seconds
    return [worker.wait(max(0.0, deadline - time.monotonic())) for worker in workers]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Return what forks processes in which TensorFlow is imported."""
    with Nursery() as made:
        yield made


@pytest.fixture
def jobs(nursery: Nursery, tmp_path: Path) -> Iterator[Jobs]:
    """Return what starts workers."""
    made = Jobs(nursery, tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return a function that fills a folder if no other test process has; all share its contents."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def fill(name: str, make: Callable[[Path], None]) -> Path:
        folder = base / name
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                (folder / "done").write_text("")
                make(folder)
        return folder

    return fill
