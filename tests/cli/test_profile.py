"""`profile SCRIPT`: a script is run and measured, or it is said why there is nothing to measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.tools.cli import main

TRAINS = """
import tensorflow as tf
import autograph_rewrite as ar

w = tf.Variable(tf.ones([4, 1]), name="w")

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ w))
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss

distributed = ar.distribute(step, {"devices": ["CPU:0", "CPU:0"], "strategy": {"name": "AllReduce"}})
for _ in range(4):
    distributed(tf.ones([6, 4]))
"""


def test_a_script_is_measured_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.py", tmp_path / "profile.json"
    script.write_text(TRAINS)
    assert main(["profile", "--json", "--steps", "2", "-o", str(out), str(script)]) == 0
    said = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    found = Profile.load(out)
    assert (said["out"], said["steps"], said["examples"]) == (str(out), 2, 6)
    assert said["predicted_step_seconds"] > 0
    assert said["attributed"]["nodes"] > 0
    assert len(found.ranks) == 1


def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('nothing')")
    assert main(["profile", "-o", str(tmp_path / "out.json"), str(script)]) == 2
    assert "ran no step to measure" in capfd.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_script_that_fails_fails_with_its_code(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(7)")
    assert main(["profile", "-o", str(tmp_path / "out.json"), str(script)]) == 7


def test_a_job_is_measured_with_the_options_that_the_verb_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('nothing')")
    assert main(["profile", "-n", "2", "-o", str(tmp_path / "out.json"), str(script)]) == 2
    told = capfd.readouterr()
    assert told.out.count("nothing") == 2
    assert "ran no step to measure" in told.err
