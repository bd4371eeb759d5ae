"""Chaos: whatever happens to the processes of a job or to their network, nobody hangs, and nobody has wrong weights.

Each case trains for a second or two. Somewhere in between a worker is killed or stopped, or a direction of the network
is slowed down, blocked or cut. Every process that is left ends with an error that names the other, or with the right
weights.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.programs.disturbed import Network
from tests.jobs.programs.fixtures import Jobs, Once, ended, tf_config, until
from tests.jobs.programs.nursery import ROOT, Nursery, Worker

TRAINING = "tests/jobs/programs/training.py"
MODES = ("session", "function", "keras")
FAULTS = ("kill", "stop", "stall", "block", "hold", "cut", "delay")
PATIENCE = 5.0
"""The timeout of the jobs."""
SHORT = 1.5
"""Seconds of a disturbance that a job should outlive."""
LIMIT = 60
NAMED = re.compile(r"ClusterError: worker \d (waited for|waited \S+ s for|failed to|runs) .*")
TOLERANCES = {"session": 1e-9, "function": 1e-9, "loop": 1e-9, "keras": 1e-5, "fit": 1e-5}

Reference = Callable[[str], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """What happens to whom, and when."""

    mode: str
    count: int
    fault: str
    victim: int
    other: int
    seconds: float
    stages: bool = False
    """Whether workers hold the stages of one model."""

    @property
    def __name__(self) -> str:
        """What the test is called."""
        what = "-stages" if self.stages else ""
        return f"{self.mode}-{self.count}{what}-{self.fault}-{self.victim}-after-{self.seconds:.2f}s"


def drawn(number: int) -> Case:
    """Return a case that depends on its number only; the first ones have all faults."""
    chance = random.Random(number)
    count = chance.choice((2, 2, 3))
    victim, other = chance.sample(range(count), 2)
    return Case(chance.choice(MODES), count, FAULTS[number % len(FAULTS)], victim, other, chance.uniform(0, 1.2))


CHOSEN = (
    Case("function", 2, "kill", 0, 1, 0.3),
    Case("keras", 2, "stall", 1, 0, 0.3),
    Case("session", 2, "block", 1, 0, 0.3),
    Case("function", 2, "kill", 0, 1, 0.3, stages=True),
)
DRAWN = tuple(drawn(number) for number in range(20))
DRAWN += tuple(replace(case, stages=True) for case in DRAWN[:14])


@pytest.fixture
def reference(once: Once, nursery: Nursery) -> Reference:
    """Return a function that gives the weights that one process trains."""

    def run(mode: str) -> Mapping[str, np.ndarray]:
        def make(folder: Path) -> None:
            worker = nursery.start([TRAINING, mode, str(folder)], folder / "log", {"JOB_PAUSE": "0"})
            assert worker.wait(LIMIT) == 0, worker.output

        return dict(np.load(once(f"single_{mode}", make) / "single.npz"))

    return run


def assert_right(folder: Path, task: int, mode: str, expected: Mapping[str, np.ndarray]) -> None:
    """Compare the weights of a worker with those of one process."""
    found = np.load(folder / f"worker{task}.npz")
    assert set(found) == set(expected)
    for name, value in expected.items():
        scale = np.max(np.abs(value), initial=0.0) or 1.0
        assert np.max(np.abs(found[name] - value), initial=0.0) <= TOLERANCES[mode] * scale, name


def disturb(case: Case, workers: list[Worker], network: Network) -> None:
    """Let happen what happens in a case."""
    victim = workers[case.victim]
    links = list(network.between(case.victim, case.other))
    match case.fault:
        case "kill":
            victim.kill(signal.SIGKILL)
        case "stop":
            victim.kill(signal.SIGSTOP)
        case "stall":
            victim.kill(signal.SIGSTOP)
            time.sleep(SHORT)
            victim.kill(signal.SIGCONT)
        case "block":
            for link in links:
                link.block()
        case "hold":
            for link in links:
                link.block()
            time.sleep(SHORT)
            for link in links:
                link.unblock()
        case "cut":
            links[0].cut()
        case "delay":
            for link in links:
                link.delay = 0.02


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.__name__) for case in CHOSEN),
        *(pytest.param(case, id=f"{n}-{case.__name__}", marks=pytest.mark.full) for n, case in enumerate(DRAWN)),
    ],
)
def test_every_process_ends_with_a_named_error_or_the_right_weights(
    case: Case, jobs: Jobs, reference: Reference
) -> None:
    expected = reference(case.mode)
    environ = {"JOB_TIMEOUT": str(PATIENCE), **({"JOB_STAGES": "1"} if case.stages else {})}
    with Network(case.count) as network:
        workers = [
            jobs.start(
                TRAINING,
                case.mode,
                jobs.folder,
                environ={**environ, "TF_CONFIG": tf_config(network.addresses(task), task)},
            )
            for task in range(case.count)
        ]
        until(lambda: all("did step 2" in worker.output or worker.code is not None for worker in workers), LIMIT)
        time.sleep(case.seconds)
        disturb(case, workers, network)
        left = [
            worker for worker in workers if case.fault not in ("kill", "stop") or worker is not workers[case.victim]
        ]
        began = time.monotonic()
        codes = ended(left, LIMIT)
        took = time.monotonic() - began
    outputs = "\n=====\n".join(worker.output[-2500:] for worker in workers)
    assert None not in codes, outputs
    finished = 0
    for task, worker in enumerate(workers):
        if worker not in left:
            continue
        if worker.code == 0:
            finished += 1
            assert_right(jobs.folder, task, case.mode, expected)
        else:
            assert NAMED.search(worker.output), outputs
    print(f"\n{case.__name__}: {finished} of {len(left)} finished, the others with an error; {took:.1f} s")
    if case.fault in ("stall", "hold", "delay"):
        assert finished == case.count, outputs


def launch(folder: Path, mode: str, count: int, restarts: int, **environ: str) -> subprocess.Popen[str]:
    """Start a job that is started anew when a process dies."""
    command = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch", "-n", str(count)]
    return subprocess.Popen(
        [*command, "--restart", str(restarts), "--grace", "2", str(ROOT / TRAINING), mode, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JOB_TIMEOUT": "20", **environ},
    )


@pytest.mark.parametrize(
    ("mode", "killed"),
    [
        ("fit", "1:13"),
        pytest.param("fit", "0:8,1:29", marks=pytest.mark.full),
        pytest.param("loop", "0:20,1:21", marks=pytest.mark.full),
    ],
)
def test_a_job_whose_worker_is_killed_starts_again_and_loses_no_committed_step(
    mode: str, killed: str, tmp_path: Path, reference: Reference
) -> None:
    expected = reference(mode)
    job = launch(tmp_path, mode, 2, restarts=2, JOB_KILLED=killed, JOB_PAUSE="0")
    output, _ = job.communicate(timeout=150)
    assert job.returncode == 0, output[-4000:]
    assert output.count("was killed by SIGKILL: restart") == 1 + killed.count(",")
    for task in range(2):
        assert_right(tmp_path, task, mode, expected)
    steps = [int(step) for step in re.findall(r"\[worker 0\] did step (\d+)", output)]
    repeated = len(steps) - len(set(steps))
    assert repeated < 6 * (1 + killed.count(",")), steps  # at most what came after the last checkpoint


@pytest.mark.full
@pytest.mark.parametrize("mode", ["fit", "loop"])
@pytest.mark.parametrize("seed", range(2))
def test_a_job_outlives_kills_at_any_moment(mode: str, seed: int, tmp_path: Path, reference: Reference) -> None:
    expected, chance = reference(mode), random.Random(seed)
    job = launch(tmp_path, mode, 2, restarts=3, JOB_PAUSE="0.05")
    for _ in range(3):
        pids = [tmp_path / f"{task}.pid" for task in range(2)]
        until(lambda pids=pids: all(pid.exists() for pid in pids) or job.poll() is not None, 60)
        time.sleep(chance.uniform(1, 5))
        if job.poll() is not None:
            break
        victim = int(chance.choice(pids).read_text())
        for pid in pids:  # the next start of the job has others
            pid.unlink()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    output, _ = job.communicate(timeout=150)
    assert job.returncode == 0, output[-4000:]
    for task in range(2):
        assert_right(tmp_path, task, mode, expected)
