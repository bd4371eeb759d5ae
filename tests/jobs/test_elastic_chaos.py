"""Random elastic jobs: who is lost, how and when, in all modes and strategies; `make test-full` runs them.

ELASTIC_JOBS says how many (16), ELASTIC_SEED with which to begin; ELASTIC_TIMES where the times are added (JSON lines).
"""

from __future__ import annotations

import json
import os
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.programs.fixtures import Once
from tests.jobs.programs.nursery import Nursery
from tests.jobs.test_elastic import (
    EVERY,
    HEARTBEAT,
    PATIENCE,
    STEPS,
    Lost,
    assert_same,
    launched,
    steps_of,
    undisturbed,
)

FIRST = int(os.environ.get("ELASTIC_SEED", "0"))
BUSY = float(os.environ.get("ELASTIC_BUSY", "1"))
"""Seconds more that a machine takes on which others run; 0.2 alone."""
COUNT = int(os.environ.get("ELASTIC_JOBS", "16"))
STRATEGIES = (("AllReduce",), ("PSLoadBalancing", "Parallax", "PartitionedPS"), ("FSDP",), ("Pipeline",))
AT_MOST = {"CUT": PATIENCE + 5, "SIGSTOP": 3 * HEARTBEAT + BUSY, "SIGKILL": BUSY}
"""Seconds until a loss is known, and its generation ended."""
HOW = ("SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP", "CUT", "HEAL")


def drawn(seed: int) -> Lost:
    """Draw a job: each combination of mode and strategy comes once in twelve."""
    rng = random.Random(seed)
    mode, strategy = list(STEPS)[seed % 3], rng.choice(STRATEGIES[seed // 3 % 4])
    workers, restarts = rng.randint(2, 4), rng.choice((0, 0, 1, 2))
    least = 1
    if strategy == "Pipeline":  # a stage has one host, so nobody can do without it
        workers, least, restarts = 2, 2, 2
    plan, left, step = "", workers, STEPS[mode].start
    while left > 1 and plan.count(",") < (2 if least > 1 else 3):
        step += rng.randint(1, 8)
        if step >= STEPS[mode].stop:
            break
        how = rng.choice(HOW)
        plan += f"{rng.randrange(left)}:{step}:{how}{'+' if how == 'HEAL' else ','}"  # which nobody has to notice
        left -= least == 1 and how != "HEAL"
    if least == 1 and rng.random() < 0.4:
        plan += f"0:{step + rng.randint(1, 3)}:JOIN"
    return Lost(mode, plan.strip("+,"), [], f"--elastic {least}:{workers} --restart {restarts}", strategy)


def times(said: str, generations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each loss how long it took to end the generation, and from there to the next one's first step."""
    found = []
    for rank, how, at in re.findall(r"\[worker (\d)\] lost by (\w+) at ([\d.]+)", said):
        for before, after in pairwise(generations):
            if before["began"] <= float(at) <= before["ended"] and after["to_first_step"] is not None:
                again = after["began"] + after["to_first_step"] - before["ended"]
                named = f"worker {rank} " in before["why"]
                told = {"how": how, "detected": before["ended"] - float(at), "stepped": again, "named": named}
                found.append({**told, "silent": before["silent"]})
    return found


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
    told = times(said, summary["generations"])
    for one in told:
        if one["how"] in AT_MOST:
            assert one["named"], told
            assert one["detected"] <= AT_MOST[one["how"]], told
    print(lost, repeated, told, [(g["workers"], g["to_first_step"], g["why"]) for g in summary["generations"]])
    if "ELASTIC_TIMES" in os.environ:
        with open(os.environ["ELASTIC_TIMES"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": seed, "job": vars(lost), "repeated": repeated, "times": told}) + "\n")
