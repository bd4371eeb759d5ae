"""A job that cannot start says why, in every process: who is missing, what differs, which port is taken."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest

from tests.jobs.programs.fixtures import Jobs, Once, ended, free_ports, tf_config
from tests.jobs.programs.nursery import Nursery

TROUBLE, DIFFERENCES = "tests/jobs/programs/trouble.py", "tests/jobs/programs/differences.py"
LIMIT = 180
DIFFER = re.compile(r"worker 1 \(127\.0\.0\.1:\d+\) would run something else than worker 0")

SAME = re.compile(r"worker 1 \(127\.0\.0\.1:\d+\) does not do the same as worker 0")

EXPECTED = {
    "program": (DIFFER, "-%Adam", "+%Momentum"),
    "configuration": (DIFFER, "-semantics: {batch_norm: sync", "+semantics: {batch_norm: local"),
    "initial_value": (DIFFER, "-%w/", "value=[1", "+%w/", "value=[2", "needs a seed"),
    "number": (DIFFER, "value=0.1", "value=1.1"),
    "captured": (DIFFER, "-captured float64[] #", "+captured float64[] #"),
    "text": (DIFFER, "-captured object[2] #", "+captured object[2] #"),
    "shape": (DIFFER, "float64[?,3]", "float64[?,4]"),
    "data": (SAME, "in step 1 of 'train_step'", "'x'", "input: per_worker"),
    "seed": ("the workers have set different random seeds (0, 1)", "set the same seed everywhere"),
}


@pytest.fixture
def told(once: Once, nursery: Nursery) -> list[dict[str, str]]:
    """Return what each worker was told of each difference."""

    def run(folder: Path) -> None:
        jobs = Jobs(nursery, folder)
        workers = jobs.job(2, DIFFERENCES, folder)
        codes = ended(workers, 120)
        jobs.end()
        assert codes == [0, 0], "\n".join(worker.output[-4000:] for worker in workers)

    folder = once("job_differences", run)
    return [json.loads((folder / f"worker{task}.json").read_text()) for task in range(2)]


@pytest.mark.parametrize("case", EXPECTED)
def test_what_differs_between_workers_is_shown_to_all_of_them(told: list[dict[str, str]], case: str) -> None:
    assert told[0][case] == told[1][case]
    assert len(told[0][case]) < 3000
    for part in EXPECTED[case]:
        if isinstance(part, str):
            assert part in told[0][case]
        else:
            assert part.search(told[0][case]), told[0][case]


def test_equal_workers_can_run_after_others_were_refused(told: list[dict[str, str]]) -> None:
    assert [worker["equal"] for worker in told] == ["", ""]


def test_a_worker_that_never_comes_is_named(jobs: Jobs) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    environ = {"TF_CONFIG": tf_config(addresses, 0), "JOB_TIMEOUT": "3"}
    began = time.monotonic()
    worker = jobs.start(TROUBLE, "none", "function", jobs.folder, environ=environ)
    assert worker.wait(LIMIT) == 1, worker.output
    assert f"ClusterError: worker 0 waited for worker 1 ({addresses[1]}) to compare what they run" in worker.output
    assert 3 < time.monotonic() - began < 40


def test_a_taken_port_is_named(jobs: Jobs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environ = {"TF_CONFIG": tf_config([address, "127.0.0.1:1"], 0)}
        worker = jobs.start(TROUBLE, "none", "function", jobs.folder, environ=environ)
        assert worker.wait(LIMIT) == 1, worker.output
    assert f"ClusterError: worker 0 cannot listen at {address}: Address already in use" in worker.output


@pytest.mark.parametrize("mode", ["function", "session"])
def test_tensorflow_that_has_started_before_the_package_is_an_error_with_the_line_to_add(jobs: Jobs, mode: str) -> None:
    (worker, _) = jobs.job(2, TROUBLE, "starts_tensorflow_first", mode, jobs.folder)
    assert worker.wait(LIMIT) == 1, worker.output
    assert "ClusterError: TensorFlow has started already, so worker 0 cannot join the job any more" in worker.output
    assert "ar.join(config)" in worker.output


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "ConfigError: TF_CONFIG is wrong: it is no JSON"),
        (tf_config(["127.0.0.1:1", "127.0.0.1:2"], 2), "ConfigError: TF_CONFIG: this is worker 2, but there are 2"),
        (tf_config(["127.0.0.1:1", "127.0.0.1:1"], 0), "ConfigError: TF_CONFIG: the address 127.0.0.1:1 stands twice"),
    ],
)
def test_a_wrong_tf_config_is_told_when_a_process_joins(jobs: Jobs, text: str, problem: str) -> None:
    worker = jobs.start(TROUBLE, "wrong", "session", jobs.folder, environ={"TF_CONFIG": text})
    assert worker.wait(LIMIT) == 1
    assert problem in worker.output


def test_workers_that_count_each_other_differently_end_with_an_error(jobs: Jobs) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    workers = [
        jobs.start(
            TROUBLE, "none", "function", jobs.folder, environ={"TF_CONFIG": tf_config(seen, task), "JOB_TIMEOUT": "5"}
        )
        for task, seen in enumerate((addresses[:2], addresses))
    ]
    assert ended(workers, LIMIT) == [1, 1]
    assert all("ClusterError: worker" in worker.output for worker in workers)
