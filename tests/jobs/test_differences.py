"""Workers that are given different values of what all share are told so in that step, all of them, and what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.jobs.programs.fixtures import Jobs, ended
from tests.jobs.programs.nursery import Worker

UNEQUAL = "tests/jobs/programs/unequal.py"
LIMIT = 180
full = pytest.mark.full
RATE, LENGTH = r"'rate.*': 0\.1 on worker 0, 0\.2 on worker 1", r"'x\S*'.*5 on worker 0, 4 on worker 1"
ROWS = r"the number of steps: 2 on worker 0, 1 on worker 1"
WRITTEN = r"variable 'w', written between steps"


@dataclass(frozen=True)
class Case:
    """What differs in which job, and how it is told."""

    mode: str
    what: str
    told: str
    kind: str = "replicas"

    @property
    def __name__(self) -> str:
        """What the test is called."""
        return f"{self.mode}-{self.kind}-{self.what}"


QUICK = (
    Case("session", "fetch", "what is fetched: loss, train on worker 0, loss on worker 1"),
    Case("session", "set", "what was run since the last step: as before on worker 0, set with value"),
    Case("session", "rate", RATE, "served"),
    Case("function", "length", LENGTH),
    Case("function", "rows", ROWS, "steps"),
    Case("function", "write", WRITTEN, "stages"),
    Case("keras", "data", "'x': "),
    Case("keras", "write", "variable 'adam/learning_rate', written between steps"),
)
MORE = (
    Case("session", "rate", RATE),
    Case("session", "rows", ROWS, "steps"),
    Case("function", "rate", RATE),
    Case("session", "static", RATE),
    Case("session", "length", LENGTH),
    Case("session", "write", WRITTEN),
    Case("session", "rate", RATE, "stages"),
    Case("session", "length", LENGTH, "served"),
    Case("session", "fetch", "what is fetched", "served"),
    Case("function", "write", WRITTEN),
    Case("function", "write", WRITTEN, "two"),
    Case("function", "rate", RATE, "shared"),
    Case("function", "rate", RATE, "served"),
    Case("function", "write", WRITTEN, "served"),
    Case("function", "rate", RATE, "shards"),
    Case("function", "write", WRITTEN, "shards"),
    Case("function", "rate", RATE, "stages"),
    Case("keras", "labels", "'y': "),
    Case("keras", "data", "'x': ", "large"),
    Case("keras", "data", "'x': ", "served"),
    Case("keras", "data", "'x:0': ", "stages"),
    Case("keras", "write", "variable 'adam/learning_rate'", "served"),
    Case("keras", "evaluate", "worker 0 is in .*, worker 1 is in "),
)
KINDS: dict[str, dict[str, str]] = {
    "replicas": {},
    "two": {"JOB_REPLICAS": "2"},
    "shared": {"JOB_CONFIG": '{"strategy": {"name": "AllReduce", "variables": "shared"}}'},
    "shards": {"JOB_REPLICAS": "2", "JOB_CONFIG": '{"strategy": {"name": "PartitionedAR"}}'},
    "served": {"JOB_STRATEGY": "PSLoadBalancing"},
    "steps": {"JOB_CONFIG": '{"steps_per_run": 3}'},
    "large": {"JOB_SMALL": "0"},
    "stages": {"JOB_STAGES": "1"},
}


def run(jobs: Jobs, case: Case) -> list[Worker]:
    """Run a job until all workers have ended."""
    arguments = (UNEQUAL, case.mode, case.what, jobs.folder)
    if case.kind == "served":
        workers, _ = jobs.job_with_servers(2, 1, *arguments, environ=KINDS[case.kind])
    else:
        workers = jobs.job(2, *arguments, environ=KINDS[case.kind])
    assert None not in ended(workers, LIMIT), "\n=====\n".join(worker.output[-3000:] for worker in workers)
    return workers


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.__name__) for case in QUICK),
        *(pytest.param(case, id=case.__name__, marks=full) for case in MORE),
    ],
)
def test_what_differs_is_told_to_all_workers_in_that_step(jobs: Jobs, case: Case) -> None:
    for worker in run(jobs, case):
        assert worker.code == 1, worker.output[-3000:]
        same = r"ClusterError: worker 1 \(127\.0\.0\.1:\d+\) does not do the same as worker 0"
        assert re.search(same, worker.output), worker.output[-3000:]
        assert re.search(case.told, worker.output), worker.output[-3000:]
        assert "did step 2" in worker.output
        assert "did step 4" not in worker.output


@pytest.mark.parametrize(
    "case",
    [
        Case("session", "read", ""),
        Case("keras", "rewrite", ""),
        pytest.param(Case("function", "rewrite", ""), marks=full),
        pytest.param(Case("function", "none", "", "shards"), marks=full),
        pytest.param(Case("session", "none", "", "served"), marks=full),
        pytest.param(Case("keras", "none", "", "stages"), marks=full),
    ],
    ids=lambda case: case.__name__,
)
def test_what_changes_nothing_is_no_difference(jobs: Jobs, case: Case) -> None:
    for worker in run(jobs, case):
        assert worker.code == 0, worker.output[-3000:]
        assert "did step 4" in worker.output
