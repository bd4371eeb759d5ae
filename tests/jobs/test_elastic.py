"""Elastic jobs: whoever is lost, and whenever, training comes to what it comes to undisturbed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.programs.fixtures import Jobs, Once, ended
from tests.jobs.programs.nursery import ROOT, Nursery

PROGRAM = "tests/jobs/programs/elastic.py"
LIMIT = 240
EXACT = 1e-9
HEARTBEAT, PATIENCE = 0.5, 8
"""Seconds from one sign of life to the next, and until who is cut off is missed."""
EVERY = 4
"""Steps from one snapshot to the next."""


@dataclass(frozen=True)
class Lost:
    """Who is lost in which generation: `rank:step:signal`; and what becomes of the job."""

    mode: str
    plan: str
    workers: list[int]
    options: str = "--elastic 1:3"
    strategy: str = "AllReduce"


JOBS = {
    "worker 0 is killed, then the new worker 1 stopped": Lost("fit", "0:9:SIGKILL,1:16:SIGSTOP", [3, 2, 1]),
    "a worker is killed, and replaced after the epoch": Lost(
        "fit", "1:8:SIGKILL", [2, 1, 2], "--elastic 1:2 --restart 1", "PSLoadBalancing"
    ),
    "a loop over a dataset loses worker 0": Lost("function", "0:11:SIGKILL", [3, 2]),
    "a session that counts its steps loses worker 0": Lost(
        "session", "0:11:SIGKILL", [2, 2], "--elastic 2:2 --restart 1"
    ),
}
STEPS = {"fit": range(6, 24), "function": range(21), "session": range(18)}
"""The steps that a program tells of."""


def launched(nursery: Nursery, folder: Path, lost: Lost) -> tuple[dict[str, Any], str]:
    """Run an elastic job; return the launcher's summary, and all that was said."""
    line = [*lost.options.split(), "--heartbeat", HEARTBEAT, "--json", "--timeout", str(LIMIT - 20)]
    environ = {"PLAN": lost.plan, "STRATEGY": lost.strategy, "PYTHONPATH": str(ROOT)}
    if "CUT" in lost.plan:
        environ["PATIENCE"] = str(PATIENCE)
    jobs = Jobs(nursery, folder)
    launcher = jobs.start("tests/jobs/programs/launch.py", *line, PROGRAM, lost.mode, folder, environ=environ)
    code = launcher.wait(LIMIT)
    jobs.end()
    said = launcher.output
    assert code == 0, said[-6000:]
    assert '{"script"' in said, said[-3000:]
    return json.loads(said[said.rindex('{"script"') :].splitlines()[0]), said


def undisturbed(once: Once, nursery: Nursery, mode: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return what the program comes to by itself."""

    def run(out: Path) -> None:
        jobs = Jobs(nursery, out)
        worker = jobs.start(PROGRAM, mode, out)
        assert ended([worker], LIMIT) == [0], worker.output

    return dict(np.load(once(f"elastic {mode}", run) / "single.npz"))


def assert_same(found: Path, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    """Fail unless a worker has come to the same."""
    values = dict(np.load(found))
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(values[name], value, rtol=EXACT, atol=EXACT), name


def steps_of(said: str) -> list[int]:
    """Return the steps that worker 0 did, in all generations."""
    return [int(step) for step in re.findall(r"\[worker 0\] did (\d+)", said)]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_loses_workers_trains_as_if_it_had_not(
    name: str, tmp_path: Path, once: Once, nursery: Nursery
) -> None:
    lost = JOBS[name]
    summary, said = launched(nursery, tmp_path, lost)
    generations = summary["generations"]
    assert [generation["workers"] for generation in generations] == lost.workers, said
    expected = undisturbed(once, nursery, lost.mode)
    for rank in range(lost.workers[-1]):
        assert_same(tmp_path / f"worker{rank}.npz", expected)
    steps = steps_of(said)
    assert sorted(set(steps)) == list(STEPS[lost.mode]), "none is skipped"
    repeated = [first - second + 1 for first, second in pairwise(steps) if second != first + 1]
    assert all(0 < count <= EVERY for count in repeated), repeated
    for generation in generations:
        if "is stopped" in generation["why"]:
            assert 1.25 <= generation["silent"] <= 1.5, "three heartbeats are the most"
