"""Profiles of two workers: all ranks by one clock, and where the time of their steps went."""

from __future__ import annotations

import json

from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.tools.verbs.profile import collected
from tests.jobs.programs.fixtures import Jobs, ended

LIMIT = 120


def test_both_ranks_are_in_one_timeline_and_their_time_is_that_of_nodes_or_named_communication(jobs: Jobs) -> None:
    workers = jobs.job(2, "tests/jobs/programs/profiled.py", jobs.folder)
    assert ended(workers, LIMIT) == [0, 0], "\n".join(worker.output[-3000:] for worker in workers)
    both = [Profile.load(jobs.folder / f"profile_{task}.json") for task in range(2)]
    assert both[0] == both[1]  # every rank has the profile of all
    profiles = both[0], collected(jobs.folder, "profiled.py")
    for found in profiles:
        assert [trace.rank for trace in found.ranks] == [0, 1]
        # Of the time in which anything runs: how long nothing does is the machine's affair.
        runs = found.attributed.share + found.attributed.other
        assert found.attributed.share > 0.95 * runs > 0
        assert found.attributed.nodes > 0
        assert found.examples == 2048
        assert found.predicted is not None
        assert found.predicted["batch"] == 2048
        events = found.trace()["traceEvents"]
        for rank in (0, 1):
            names = {event["name"] for event in events if event["pid"] == rank}
            assert any(name.startswith("CollectiveReduceV2") and name.endswith("for w") for name in names)
    offset = json.loads(workers[0].output.strip().splitlines()[-1])
    assert abs(offset["value"]) <= offset["error"]  # one machine has one clock: what exchanges say allows for that
