"""A worker that dies, hangs or does something else: all the others end with an error that names it, soon."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from tests.jobs.programs.fixtures import Jobs, ended, until
from tests.jobs.programs.nursery import Worker

TROUBLE = "tests/jobs/programs/trouble.py"
LIMIT = 180
PATIENCE = 5
LATE = 1
"""Seconds by which who comes late does."""
DID = {"session": "finish run [34] of the session", "function": "finish step [23]", "keras": "finish step [23]"}
full = pytest.mark.full


def run(
    jobs: Jobs, kind: str, mode: str, count: int = 2, environ: Mapping[str, str] = MappingProxyType({})
) -> list[Worker]:
    """Run a job in which worker 1 gets into trouble, until all others have ended."""
    environ = {"JOB_TIMEOUT": str(PATIENCE), **environ}
    if kind in ("killed", "killed_soon", "stopped"):  # also what TensorFlow does when Python ends must not hang
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
    told = re.search(
        r"(step|run) \d+ of .* has stood still for \d+ s: worker 1 \(127\.0\.0\.1:\d+\) has not answered .*"
        r"; it exchanges .*\(key \d+\).*; after \d+ s \(timeout_seconds\) it is ended",
        first.output,
    )
    assert told, first.output[-3000:]
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


@pytest.mark.parametrize(
    "kind", [pytest.param("killed", marks=full), pytest.param("killed_soon", marks=full), "stopped"]
)
def test_a_step_inside_another_function_ends_too(jobs: Jobs, kind: str) -> None:
    first, _ = run(jobs, kind, "outer")
    assert "autograph_rewrite: worker 0 waited for worker 1 (127.0.0.1:" in first.output
    if kind == "stopped":  # else the end of a connection may end the step first
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
    # The step of worker 0 stands still until worker 1 is gone, or is broken off at once and worker 1 still tells why.
    if not re.search(r"InvalidArgumentError: on worker 1 \(127\.0\.0\.1:\d+\): ", first.output):
        assert_named(first, mode)
    assert first.code == 1


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


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_all_workers_together_can_carry_on_after_an_error(jobs: Jobs, mode: str, late: int) -> None:
    workers = run(jobs, "all_fail", mode, environ={"JOB_LATE": str(late), "JOB_TIMEOUT": str(LIMIT / 4)})
    assert ended(workers, LIMIT) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)
    assert all(worker.output.count("caught") == 1 and "did step 6" in worker.output for worker in workers)


def run_with_server(
    jobs: Jobs, kind: str, mode: str, signal_to_server: int | None = None, late: int = -1, **options: object
) -> tuple[Worker, Worker, Worker]:
    """Run a job of two workers and a parameter server; return when those have ended of whom it is to be expected."""
    environ = {"JOB_TIMEOUT": str(PATIENCE), "SLOW_EXIT": "1", "JOB_LATE": str(late)}
    if options:
        environ["JOB_CONFIG"] = json.dumps({"variables": [{"match": ".*", "synchronizer": "ps", **options}]})
    (first, second), (server,) = jobs.job_with_servers(2, 1, TROUBLE, kind, mode, jobs.folder, environ=environ)
    if signal_to_server is not None:
        until(lambda: all("did step 2" in w.output or w.code is not None for w in (first, second)), LIMIT)
        server.kill(signal_to_server)
    awaited = [first] if kind in ("killed", "stopped", "hangs") else [first, second]
    assert None not in ended(awaited, LIMIT), "\n".join(worker.output[-3000:] for worker in (first, second, server))
    return first, second, server


@pytest.mark.parametrize("mode", ["session", pytest.param("function", marks=full), pytest.param("keras", marks=full)])
def test_a_parameter_server_that_is_killed_is_named_by_all_workers(jobs: Jobs, mode: str) -> None:
    *workers, _ = run_with_server(jobs, "none", mode, signal.SIGKILL)
    for task, worker in enumerate(workers):
        problem = rf"ClusterError: worker {task} waited for ps 0 \(127\.0\.0\.1:\d+\).* to finish run \d of the session"
        assert re.search(problem, worker.output), worker.output[-3000:]
        assert worker.code == 1


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_a_parameter_server_that_is_stopped_is_named_by_all_workers(jobs: Jobs, mode: str) -> None:
    *workers, _ = run_with_server(jobs, "none", mode, signal.SIGSTOP)
    for task, worker in enumerate(workers):
        assert re.search(rf"ClusterError: worker {task} waited for .*ps 0 \(", worker.output), worker.output[-3000:]


@pytest.mark.parametrize("mode", ["session", pytest.param("function", marks=full), pytest.param("keras", marks=full)])
def test_a_killed_worker_is_named_though_the_other_waits_at_the_server_which_ends(jobs: Jobs, mode: str) -> None:
    first, _, server = run_with_server(jobs, "killed", mode)
    problem = (
        r"ClusterError: worker 0 waited for worker 1 \(127\.0\.0\.1:\d+\) to finish run \d of the session: no answer"
    )
    assert re.search(problem, first.output), first.output[-3000:]
    assert server.wait(LIMIT) == 0, server.output


def test_a_server_whose_workers_are_all_stopped_names_them(jobs: Jobs) -> None:
    environ = {"JOB_TIMEOUT": str(PATIENCE)}
    workers, (server,) = jobs.job_with_servers(2, 1, TROUBLE, "none", "session", jobs.folder, environ=environ)
    until(lambda: all("did step 2" in w.output or w.code is not None for w in workers), LIMIT)
    for worker in workers:
        worker.kill(signal.SIGSTOP)
    assert server.wait(LIMIT) == 1, server.output
    problem = r"ClusterError: ps 0 has waited \d+ s for worker 0 \(127\.0\.0\.1:\d+\), worker 1 \(.*\): no answer"
    assert re.search(problem, server.output), server.output


@pytest.mark.full
def test_a_stopped_worker_is_named_though_the_other_waits_at_the_server(jobs: Jobs) -> None:
    first, _, _ = run_with_server(jobs, "stopped", "function")
    assert re.search(r"ClusterError: worker 0 waited for worker 1 \(", first.output), first.output[-3000:]


def test_a_worker_that_does_something_else_holds_nobody_up_for_ever_at_the_server(jobs: Jobs) -> None:
    first, _, _ = run_with_server(jobs, "hangs", "function")
    problem = f"worker 0 waited {PATIENCE} s for the other workers to finish run 3 of the session; all processes answer"
    assert problem in first.output, first.output[-3000:]


@pytest.mark.parametrize("mode", ["session", pytest.param("function", marks=full)])
def test_a_parameter_server_that_never_comes_is_named(jobs: Jobs, mode: str) -> None:
    environ = {"JOB_TIMEOUT": "3"}
    workers, servers = jobs.job_with_servers(2, 2, TROUBLE, "none", mode, jobs.folder, environ=environ, absent=1)
    assert ended([*workers, *servers], LIMIT) == [1, 1, 0]
    for task, worker in enumerate(workers):
        problem = rf"ClusterError: worker {task} waited .*for ps 1 \(127\.0\.0\.1:\d+\)"
        assert re.search(problem, worker.output), worker.output[-3000:]


def test_a_killed_worker_that_others_may_not_leave_behind_is_named_soon(jobs: Jobs) -> None:
    first, _, server = run_with_server(jobs, "killed", "session", staleness=1)
    problem = r"ClusterError: worker 0 waited for worker 1 \(127\.0\.0\.1:\d+\) to do step 3: no answer"
    assert re.search(problem, first.output), first.output[-3000:]
    assert server.wait(LIMIT) == 0, server.output


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_a_step_that_has_failed_on_another_worker_of_a_server_fails_at_once_and_all_go_on(
    jobs: Jobs, mode: str
) -> None:
    """TensorFlow tells nothing to who comes to it later: the watchdog asks."""
    workers = run_with_server(jobs, "skips", mode, late=0)[:2]
    assert ended(workers, LIMIT) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)
    assert all("did step 6" in worker.output for worker in workers)
    assert [worker.output.count("caught") for worker in workers] == [2, 2]
    assert_failed_at_once(workers, late=0)


@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_a_step_that_fails_while_another_worker_of_a_server_waits_fails_at_once_and_all_go_on_or_end(
    jobs: Jobs, mode: str
) -> None:
    """TensorFlow aborts the collectives of who hears of it by them first, instead of by the server: one in 10 to 60."""
    workers = run_with_server(jobs, "skips", mode, late=1)[:2]
    codes = ended(workers, LIMIT)
    assert codes in ([0, 0], [1, 1]), "\n".join(worker.output[-3000:] for worker in workers)
    expected = "TensorFlow refuses all collectives once one was broken off" if any(codes) else "did step 6"
    assert all(expected in worker.output for worker in workers)
    assert_failed_at_once(workers, late=1)


def assert_failed_at_once(workers: Sequence[Worker], late: int) -> None:
    """Check that the program has got what it raised on one worker on both, and soon, each time."""
    assert all("InvalidArgumentError" in worker.output for worker in workers)
    times = [[float(time) for time in re.findall(r"caught (\S+)", worker.output)] for worker in workers]
    assert all(times)
    for one, other in zip(*times, strict=False):  # a job may end in the second
        assert abs(one - other) - (late == 0) * LATE < PATIENCE / 2, "one has waited for the other until it was ended"


@pytest.mark.parametrize(
    ("kind", "options"),
    [("leaves", {"staleness": 1}), ("killed", {"sync": False}), pytest.param("leaves", {"sync": False}, marks=full)],
)
@pytest.mark.parametrize("mode", [pytest.param("session", marks=full), "function"])
def test_workers_carry_on_without_one_that_they_do_not_wait_for(
    jobs: Jobs, mode: str, kind: str, options: dict[str, object]
) -> None:
    first, _, server = run_with_server(jobs, kind, mode, **options)
    assert (first.code, server.wait(LIMIT)) == (0, 0), first.output[-3000:]
    assert "did step 6" in first.output
