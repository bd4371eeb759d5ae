"""Replicas of two workers: numbers count worker by worker, policies reach over processes, tables stay with theirs."""

from __future__ import annotations

import json

import pytest

from tests.jobs.programs.fixtures import Jobs, ended

LIMIT = 120


@pytest.mark.parametrize("mode", ["mirrored", "shared"])
def test_replicas_of_two_workers_have_numbers_components_and_data(jobs: Jobs, mode: str) -> None:
    workers = jobs.job(2, "tests/jobs/programs/replicas.py", jobs.folder, environ={"JOB_MODE": mode})
    assert ended(workers, LIMIT) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)
    found = [json.loads((jobs.folder / f"worker{task}.json").read_text()) for task in range(2)]
    for one in found:
        assert one["ids"] == one["gathered"] == [0, 1, 2, 3]
        assert one["components"] == [1, 2, 3, 4]
        assert one["found"] == [1, 2, 1, 2]
        assert (one["written"], one["read"], one["first"]) == (2.5, 10, 1)
        assert one["shared out"] == [6, 7, 8, 9]  # 20 / 4 each, and what the step adds
    assert [one["data"] for one in found] == [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        [[100, 101, 102, 103], [104, 105], []],
    ]
