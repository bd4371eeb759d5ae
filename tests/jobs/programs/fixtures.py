"""Fixtures for jobs of several processes: a nursery for quick ones, and results that all test processes share."""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.jobs.programs.nursery import ROOT, Nursery, Worker

Python = Callable[..., "subprocess.CompletedProcess[str]"]
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


def tf_config(addresses: Sequence[str], task: int, servers: Sequence[str] = (), job: str = "worker") -> str:
    """Return TF_CONFIG of one worker, or of one parameter server."""
    cluster = {"worker": list(addresses), **({"ps": list(servers)} if servers else {})}
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": task}})


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

    def start(
        self, *argv: object, environ: Mapping[str, str] | None = None, errors: Path | None = None, cwd: Path = ROOT
    ) -> Worker:
        """Start one process."""
        log = self.folder / f"process_{len(self._workers)}.log"
        environ = {"TF_CPP_MIN_LOG_LEVEL": "1", **(environ or {})}
        worker = self._nursery.start([str(arg) for arg in argv], log, environ, errors=errors, folder=cwd)
        self._workers.append(worker)
        return worker

    def job(
        self, count: int, *argv: object, environ: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> list[Worker]:
        """Start the workers of one job."""
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        environs = [{**(environ or {}), "TF_CONFIG": tf_config(addresses, task)} for task in range(count)]
        return [self.start(*argv, environ=each, cwd=cwd) for each in environs]

    def job_with_servers(
        self, workers: int, servers: int, *argv: object, environ: Mapping[str, str] | None = None, absent: int = 0
    ) -> tuple[list[Worker], list[Worker]]:
        """Start the workers and the parameter servers of one job, of which the last ones never come."""
        addresses = [f"127.0.0.1:{port}" for port in free_ports(workers + servers)]
        each = addresses[:workers], range(workers), addresses[workers:]
        trains = [tf_config(each[0], task, each[2]) for task in each[1]]
        serves = [tf_config(each[0], task, each[2], "ps") for task in range(servers - absent)]
        environ = {"JOB_STRATEGY": "PSLoadBalancing", **(environ or {})}
        started = [self.start(*argv, environ={**environ, "TF_CONFIG": said}) for said in (*serves, *trains)]
        return started[len(serves) :], started[: len(serves)]

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


def until(reached: Callable[[], bool], seconds: float) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Return what forks processes in which TensorFlow is imported."""
    with Nursery() as made:
        made.wait(120)
        yield made


@pytest.fixture
def jobs(nursery: Nursery, tmp_path: Path) -> Iterator[Jobs]:
    """Return what starts workers."""
    made = Jobs(nursery, tmp_path)
    yield made
    made.end()


@pytest.fixture
def forked_python(nursery: Nursery, tmp_path: Path) -> Iterator[Python]:
    """Return a function that runs a script as `python SCRIPT` does, in a process that the nursery forks.

    It is for what happens once per process, but not before TensorFlow is imported.
    """
    folder = tmp_path / "forked_python"
    folder.mkdir()
    jobs = Jobs(nursery, folder)

    def run(
        script: Path | str,
        *arguments: str,
        cwd: Path = ROOT,
        timeout: float = 60,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        if isinstance(script, str):
            text, script = script, folder / "program.py"
            script.write_text(text)
        errors = folder / "errors.log"
        errors.unlink(missing_ok=True)
        worker = jobs.start(script, *arguments, environ=environ, errors=errors, cwd=cwd)
        code = worker.wait(timeout)
        assert code is not None, worker.output + errors.read_text(errors="replace")
        return subprocess.CompletedProcess(
            [script, *arguments], code, worker.output, errors.read_text(errors="replace")
        )

    yield run
    jobs.end()


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
