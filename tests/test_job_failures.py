"""A worker that dies, hangs or does something else: all the others end with an error that names it, soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.jobs.fixtures import Jobs, ended
from tests.jobs.nursery import ROOT, Worker

TROUBLE = "tests/jobs/trouble.py"
LIMIT = 60
PATIENCE = 5
DID = {"session": "finish run [34] of the session", "function": "finish step [23]", "keras": "finish step [23]"}
full = pytest.mark.full


def run(jobs: Jobs, kind: str, mode: str, count: int = 2) -> list[Worker]:
    """Run a job in which worker 1 gets into trouble, until all others have ended."""
    environ = {"JOB_TIMEOUT": str(PATIENCE)}
    if kind in ("killed", "stopped"):  # also what TensorFlow does when Python ends must not hang
        environ["SLOW_EXIT"] = "1"
    workers = jobs.job(count, TROUBLE, kind, mode, jobs.folder, environ=environ)
    survivors = [worker for task, worker in enumerate(workers) if task != 1]
    assert None not in ended(survivors, LIMIT), "\n".join(worker.output[-3000:] for worker in survivors)
    return workers


def assert_named(worker: Worker, mode: str, task: int = 0) -> None:
    """Check that a worker has said whom it waited for, and for what."""
    problem = rf"ClusterError: worker {task} waited for .*worker 1 \(127\.0\.0\.1:\d+\).* to {DID[mode]}: no answer"
    assert re.search(problem, worker.output), worker.output[-3000:]
    assert worker.code == 1


@pytest.mark.parametrize("mode", ["session", "function", pytest.param("keras", marks=full)])
def test_a_worker_that_is_killed_is_named_by_the_other(jobs: Jobs, mode: str) -> None:
    first, second = run(jobs, "killed", mode)
    assert second.code == -signal.SIGKILL
    assert_named(first, mode)


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function", pytest.param("keras", marks=full)])
def test_a_worker_that_is_stopped_is_named_by_the_other(jobs: Jobs, mode: str) -> None:
    first, second = run(jobs, "stopped", mode)
    assert second.code is None
    assert_named(first, mode)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["killed", "stopped"])
def test_a_lost_worker_is_named_by_each_of_two_others(jobs: Jobs, kind: str) -> None:
    first, _, third = run(jobs, kind, "function", count=3)
    for task, worker in ((0, first), (2, third)):
        assert_named(worker, "function", task)


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_a_thread_that_is_always_busy_does_not_hide_that_a_worker_is_gone(jobs: Jobs, mode: str) -> None:
    first, _ = run(jobs, "busy", mode)
    assert_named(first, mode)


@pytest.mark.parametrize("kind", ["killed", pytest.param("stopped", marks=full)])
def test_a_step_inside_another_function_ends_too(jobs: Jobs, kind: str) -> None:
    first, _ = run(jobs, kind, "outer")
    assert "Collective ops is aborted by: worker 0 waited for worker 1" in first.output
    assert first.code == 1


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "keras"])
def test_an_exception_in_one_worker_ends_the_others(jobs: Jobs, mode: str) -> None:
    first, second = run(jobs, "raises", mode)
    assert "ValueError: the data of worker 1 are broken" in second.output
    assert_named(first, mode)


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("session", "ValueError: Cannot feed value of shape"),
        pytest.param(
            "function", r"GraphError: the batch inputs of one step have different sizes (ids: 4, y: 3)", marks=full
        ),
        pytest.param("keras", "GraphError: the batch inputs of one step have different sizes", marks=full),
    ],
)
def test_a_wrong_shape_in_one_worker_ends_the_others(jobs: Jobs, mode: str, problem: str) -> None:
    first, second = run(jobs, "shape", mode)
    assert problem in second.output
    assert_named(first, mode)


@pytest.mark.parametrize("mode", ["session", pytest.param("function", marks=full)])
def test_an_error_of_the_step_itself_stays_what_it_is_and_ends_the_others(jobs: Jobs, mode: str) -> None:
    first, second = run(jobs, "user_error", mode)
    assert "InvalidArgumentError" in second.output
    assert "embedding_lookup" in second.output
    assert_named(first, mode)


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), pytest.param("function", marks=full), "keras"])
def test_a_worker_with_fewer_batches_is_named_by_the_other(jobs: Jobs, mode: str) -> None:
    first, second = run(jobs, "leaves", mode)
    assert "has no more batches" in second.output
    assert_named(first, mode)


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_a_worker_that_does_something_else_is_told_from_one_that_is_gone(jobs: Jobs, mode: str) -> None:
    first, second = run(jobs, "hangs", mode)
    problem = f"worker 0 waited {PATIENCE} s for the other workers to {DID[mode]}; all processes answer"
    assert re.search(problem, first.output), first.output[-3000:]
    assert (first.code, second.code) == (1, None)


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_a_worker_cannot_skip_a_step_that_failed_there_only(jobs: Jobs, mode: str) -> None:
    workers = run(jobs, "skips", mode)
    assert ended(workers, LIMIT) == [1, 1]
    assert "caught" in workers[1].output
    assert "to carry on after an error, too" in workers[1].output
    assert "did step 4" not in workers[0].output + workers[1].output


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_all_workers_together_can_carry_on_after_an_error(jobs: Jobs, mode: str) -> None:
    workers = run(jobs, "all_fail", mode)
    assert ended(workers, LIMIT) == [0, 0]
    assert all("caught" in worker.output and "did step 6" in worker.output for worker in workers)


def test_the_launcher_ends_the_job_and_leaves_nobody_behind(jobs: Jobs) -> None:
    command = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch", "-n", "2", str(ROOT / TROUBLE)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JOB_TIMEOUT": str(PATIENCE)}
    began = time.monotonic()
    done = subprocess.run(
        [*command, "killed", "function", str(jobs.folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environ,
        check=False,
    )
    assert done.returncode == 1
    assert "worker 1 was killed by SIGKILL" in done.stderr
    assert time.monotonic() - began < LIMIT
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(jobs.folder) not in processes
