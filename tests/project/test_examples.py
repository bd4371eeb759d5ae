"""The examples run as a user runs them: as scripts, in a process of their own, here with little data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autograph_rewrite as ar
from tests.jobs.programs.fixtures import Python
from tests.support.paths import EXAMPLES

TIMEOUT = 150


@pytest.fixture
def run(forked_python: Python, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs an example in an empty folder and returns what it printed."""
    environ = {"EXAMPLE_STEPS": "40", "COLUMNS": "120"}

    def run(script: str, *arguments: str, code: int = 0) -> str:
        done = forked_python(EXAMPLES / script, *arguments, cwd=tmp_path, environ=environ, timeout=TIMEOUT)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize(("mode", "wanted", "code"), [("shared", 0.0, 0), ("mirrored", 1.0, 1)])
def test_the_demo_compares_one_device_with_replicas_and_fails_if_too_little_is_learnt(
    run: Callable[..., str], tmp_path: Path, mode: str, wanted: float, code: int
) -> None:
    options = [f"--variables={mode}", f"--accuracy={wanted}", "--epochs=2", "--examples=320", "--out=demo"]
    printed = run("digits.py", *options, code=code)
    rows = re.findall(r"^ +\d+ +(\d\.\d+) +█+ +(\d\.\d+) +█+ +(\S+) +[\d.]+% +[\d.]+%", printed, re.MULTILINE)
    assert len(rows) == 2, printed
    for one, many, difference in rows:
        assert float(one) == pytest.approx(float(many), abs=1e-3)
        assert float(difference) < 1e-3
    assert re.search(rf"^ok: \d+ values agree .* {mode}, CPU:0, CPU:1; worst error \d.\de-1\d,", printed, re.MULTILINE)
    assert f"(wanted: {wanted:.0%})" in printed
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "plan.yaml", "graph.ar", "new.ar", "original.txt", "report.html", "rewritten.txt",
    }  # fmt: skip
    assert ar.Plan.load(tmp_path / "demo" / "plan.yaml").mode == mode
    assert "replica_1/" in (tmp_path / "demo" / "rewritten.txt").read_text(encoding="utf-8")


def test_the_custom_loop_learns_and_keeps_the_user_s_variables(run: Callable[..., str]) -> None:
    printed = run("custom_loop.py")
    assert losses(printed)[-1] < losses(printed)[0] / 5
    assert "tf.Variable still" in printed


def test_the_session_graph_learns_and_is_verified(run: Callable[..., str]) -> None:
    printed = run("session_graph.py")
    assert losses(printed)[-1] < losses(printed)[0]
    assert "for 2 replicas (mirrored)" in printed
    assert re.search(r"^ok: 5 values agree", printed, re.MULTILINE)


def test_the_digits_train_in_a_process_as_the_tutorial_shows(run: Callable[..., str], tmp_path: Path) -> None:
    shown = (EXAMPLES.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    first = re.search(r"\[worker 0\] epoch 1  loss (\S+)", shown)
    assert first is not None
    assert losses(run("digits_job.py")) == [pytest.approx(float(first[1]), abs=1e-3)]
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("name", ["custom_loop.py", "session_graph.py"])
def test_the_small_examples_are_small(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("name", ["job.py", "stages.py"])
def test_the_job_trains_alike_in_one_process_and_in_two(run: Callable[..., str], tmp_path: Path, name: str) -> None:
    script = str(EXAMPLES / name)
    command = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch", "-n", "2", "--timeout", "120", script]
    environment = {**os.environ, "EXAMPLE_STEPS": "80", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = [re.findall(rf"\[worker {task}\] epoch \d+  loss (\S+)", done.stdout) for task in (0, 1)]
    assert len(workers[0]) == 2
    assert workers[0] == workers[1], "every worker sees the losses of the whole batch"
    assert (tmp_path / "model.keras").exists()
    (tmp_path / "model.keras").unlink()

    alone = re.findall(r"epoch \d+  loss (\S+)", run(name))
    assert float(alone[-1]) < 0.5
