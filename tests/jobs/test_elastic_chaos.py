"""Random elastic jobs: who is lost, how and when, in all modes and strategies; `make test-full` runs them.

ELASTIC_JOBS says how many (16), ELASTIC_SEED with which to begin.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.jobs.programs.fixtures import Once
from tests.jobs.programs.nursery import Nursery
from tests.jobs.test_elastic import EVERY, STEPS, Lost, assert_same, launched, steps_of, undisturbed

FIRST = int(os.environ.get("ELASTIC_SEED", "0"))
COUNT = int(os.environ.get("ELASTIC_JOBS", "16"))
STRATEGIES = ("AllReduce", "PSLoadBalancing", "Parallax", "PartitionedPS")


def drawn(seed: int) -> Lost:
    """Draw a job: each combination of mode and strategy comes once in twelve."""
    rng = random.Random(seed)
    mode, strategy = list(STEPS)[seed % 3], STRATEGIES[seed // 3 % 4]
    workers, restarts = rng.randint(2, 4), rng.choice((0, 0, 1, 2))
    plan, left, step = [], workers, STEPS[mode].start
    while left > 1 and len(plan) < 3:
        step += rng.randint(1, 8)
        how = rng.choice(("SIGKILL", "SIGKILL", "SIGSTOP"))
        plan.append(f"{rng.randrange(left)}:{step}:{how}")
        left -= 1
    return Lost(mode, ",".join(plan), [], f"--elastic 1:{workers} --restart {restarts}", strategy)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_job_in_which_anything_happens_trains_as_if_nothing_had(
    seed: int, tmp_path: Path, once: Once, nursery: Nursery
) -> None:
    lost = drawn(seed)
    summary, said = launched(nursery, tmp_path, lost)
    expected = undisturbed(once, nursery, lost.mode)
    for rank in range(summary["generations"][-1]["workers"]):
        assert_same(tmp_path / f"worker{rank}.npz", expected)
    steps = steps_of(said)
    assert sorted(set(steps)) == list(STEPS[lost.mode]), "none is skipped"
    repeated = [first - second + 1 for first, second in pairwise(steps) if second != first + 1]
    assert all(0 <= count <= EVERY for count in repeated), repeated
    print(lost, [(g["workers"], g["to_first_step"], g["why"], g["silent"]) for g in summary["generations"]])
