"""Workers that are asked to end do so together, behind the same step, and what they have saved is where they go on."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import numpy as np

from tests.jobs.programs.fixtures import Jobs, ended, until
from tests.jobs.programs.nursery import Worker

PROGRAM = "tests/jobs/programs/preemption.py"
LONG = 100_000
LIMIT = 60


def preempted(jobs: Jobs, mode: str, folder: Path, *, stopped: bool = False) -> list[Worker]:
    """Start two workers, and ask one of them to end once they are under way, as a cluster does."""
    workers = jobs.job(2, PROGRAM, mode, folder, LONG, environ={"AUTOGRAPH_GRACE": "5" if stopped else "20"})
    until(lambda: all("under way" in worker.output for worker in workers), LIMIT)
    if stopped:
        workers[0].kill(signal.SIGSTOP)
    workers[1].kill(signal.SIGTERM)
    return workers


def test_all_workers_end_behind_the_same_step_although_one_was_asked_and_its_checkpoint_is_of_that_step(
    jobs: Jobs, tmp_path: Path
) -> None:
    workers = preempted(jobs, "function", tmp_path)
    assert ended(workers, LIMIT) == [143, 143], [worker.output for worker in workers]
    steps = [int(n) for worker in workers for n in re.findall(r"worker \d ends after step (\d+)", worker.output)]
    assert len(steps) == 2
    assert len(set(steps)) == 1
    assert all(f"hook {steps[0]}\n" in worker.output for worker in workers)
    assert all(f"saved {tmp_path}/checkpoints/step-{steps[0]:08d}" in worker.output for worker in workers)
    again = jobs.job(2, PROGRAM, "function", tmp_path, steps[0] + 2)  # it compares the step with the variable
    assert ended(again, LIMIT) == [0, 0], [worker.output for worker in again]


def test_a_fit_goes_on_in_the_middle_of_an_epoch_and_ends_with_the_weights_of_the_undisturbed_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("undisturbed", "preempted")]
    for folder in folders:
        folder.mkdir()
    workers = preempted(jobs, "fit", folders[1])
    assert ended(workers, LIMIT) == [143, 143], [worker.output for worker in workers]
    (step,) = {int(n) for worker in workers for n in re.findall(r"ends after step (\d+)", worker.output)}
    assert (folders[1] / "backup" / "preempted-1.npz").exists()
    total = (step // 4 + 3) * 5  # epochs of four steps, and two more of them
    for folder in folders:
        workers = jobs.job(2, PROGRAM, "fit", folder, total)
        assert ended(workers, LIMIT) == [0, 0], [worker.output for worker in workers]
    done = total // 5 * 4
    assert f"steps {done - step}\n" in workers[0].output
    with np.load(folders[0] / "weights.npz") as one, np.load(folders[1] / "weights.npz") as other:
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name])
    assert not (folders[1] / "backup" / "preempted-1.npz").exists()


def test_a_worker_whose_peer_does_not_answer_ends_within_the_grace_time_by_force_and_names_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    workers = preempted(jobs, "function", tmp_path, stopped=True)
    began = time.monotonic()
    assert workers[1].wait(8) == 143, workers[1].output
    assert time.monotonic() - began < 5, "the grace time"
    assert re.search(r"worker 1 ends in step \d+, as SIGTERM asks for, by force: worker 0 \(", workers[1].output)


def test_a_server_that_is_asked_to_end_lets_its_workers_end_together_first(jobs: Jobs, tmp_path: Path) -> None:
    environ = {"AUTOGRAPH_GRACE": "20"}
    workers, (server,) = jobs.job_with_servers(2, 1, PROGRAM, "function", tmp_path, LONG, environ=environ)
    until(lambda: all("under way" in worker.output for worker in workers), LIMIT)
    server.kill(signal.SIGTERM)
    assert ended([*workers, server], LIMIT) == [143, 143, -signal.SIGTERM], [p.output for p in (*workers, server)]
    assert "ps 0 is asked to end by SIGTERM, and tells its workers; it serves worker 0 (" in server.output
    steps = {int(n) for worker in workers for n in re.findall(r"worker \d ends after step (\d+)", worker.output)}
    assert len(steps) == 1, "both end behind the same step"
    assert f"saved {tmp_path}/checkpoints/step-{steps.pop():08d}" in workers[0].output


def test_a_server_whose_workers_do_not_end_does_so_by_itself_in_time_and_names_them(jobs: Jobs, tmp_path: Path) -> None:
    environ = {"AUTOGRAPH_GRACE": "3"}
    workers, (server,) = jobs.job_with_servers(2, 1, PROGRAM, "function", tmp_path, LONG, environ=environ)
    until(lambda: all("under way" in worker.output for worker in workers), LIMIT)
    for worker in workers:
        worker.kill(signal.SIGSTOP)
    server.kill(signal.SIGTERM)
    assert server.wait(8) == -signal.SIGTERM, server.output
    assert re.search(r"ps 0 ends, as SIGTERM asks for, by force: worker 0 \(.* has not ended before it", server.output)
