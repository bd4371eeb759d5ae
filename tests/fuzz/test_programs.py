"""A sample of the random programs of `make fuzz`, and what judges them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import many, one, table
from tests.fuzz.__main__ import seeds_of
from tests.fuzz.program import Program

SAMPLE = (1, 6, 7, 10, 11, 15, 17, 27, 30, 33)
FOUND = (25, 93, 103, 3477, 3876)
"""A handle away from its variable; a trial without micro-batches; a lookup as an update; sizes and interleaved rows;
arrays of gradients that servers fill."""


@pytest.mark.parametrize("seed", SAMPLE + FOUND)
def test_a_random_program_gives_what_one_device_gives_or_is_refused(seed: int) -> None:
    outcome = one.run(seed)
    assert outcome.outcome in ("equal", "refused"), outcome


def test_a_seed_always_gives_the_same_program() -> None:
    random.seed(1)
    first = [Program.draw(seed) for seed in range(50)]
    random.seed(2)
    assert [Program.draw(seed) for seed in range(50)] == first
    assert {program.mode for program in first} == {"session", "reference", "function", "keras"}


def test_a_number_that_is_off_by_more_than_rounding_is_wrong() -> None:
    right = {"step 0 loss": np.array(1.0), "variable w0": np.array([1.0, 2.0])}
    trial = one.Trial(lambda nudge: {n: v * (1 + nudge) for n, v in right.items()}, lambda: right, (), False)
    assert one.compare(trial, right, right)[0] == "equal"
    off = {**right, "variable w0": np.array([1.0, 2.0 + 1e-7])}
    assert one.compare(trial, right, off)[:2] == ("wrong", "differs: variable w#")
    assert one.compare(trial, right, {"step 0 loss": np.array(1.0)})[0] == "wrong"
    noisy = one.Trial(lambda nudge: {**right, "variable w0": np.array([1.0, 2.1])}, lambda: off, (), False)
    assert one.compare(noisy, right, off)[0] == "skipped"


def test_a_run_goes_on_where_it_stopped_and_is_compared(tmp_path: Path) -> None:
    out = tmp_path / "before.jsonl"
    lines = [{"seed": 3, "outcome": "equal", "reason": ""}, {"seed": 4, "outcome": "crash", "reason": "KeyError: _"}]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert many.run_many([3, 4], 1, out) == lines  # nothing is left, so no process is started
    after = [{"seed": 3, "outcome": "refused", "reason": "no"}, {"seed": 4, "outcome": "equal", "reason": ""}]
    text = "\n".join(table.comparison(lines, after))
    assert "was right: seed 3 is refused: no" in text
    assert "crash: seed" not in text
    assert "2 programs: 1 equal" in "\n".join(table.summary(lines))


def test_seeds_are_given_as_ranges_and_lists() -> None:
    assert seeds_of("2:5,9") == [2, 3, 4, 9]
