"""`launch --status` and `--metrics`: how far the processes of a job have come, seen from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch"]
STEPS = """\
import json, os, sys, time, types
from autograph_rewrite.runtime.job.progress import note_saved, requested
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
observer = requested()
trace = types.SimpleNamespace(rewritten=types.SimpleNamespace(report=types.SimpleNamespace(task=task)))
for step in range([5, 2][task]):
    with observer.step(trace, 8):
        pass
if task == 0:
    note_saved("snapshot", 4)
with observer.step(trace, 8):
    while not os.path.exists("end"):
        time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "s.py").write_text(STEPS)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running = []

    def launch(*options: str) -> subprocess.Popen[str]:
        running.append(subprocess.Popen([*COMMAND, "-n", "2", *options, "s.py"], stdout=-1, stderr=-1, text=True))
        return running[-1]

    yield launch
    for process in running:
        process.kill()
        process.communicate(timeout=30)


def status(*options: str) -> str:
    done = subprocess.run([*COMMAND, "--status", *options], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def jobs(steps: list[int]) -> list[dict[str, Any]]:
    """Wait until the processes have done so many steps, and return the status."""
    end = time.monotonic() + 60
    while True:
        found: list[dict[str, Any]] = json.loads(status("json"))["jobs"]
        if found and [p["progress"].get("steps") for p in found[0]["processes"]] == steps:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)


def test_the_status_says_who_has_done_how_many_steps(folder: Path, start: Callable[..., Any]) -> None:
    assert "no job" in status()
    job = start()
    (found,) = jobs([5, 2])
    assert (found["pid"], found["script"]) == (job.pid, "s.py")
    assert [p["progress"]["examples"] for p in found["processes"]] == [40, 16]
    assert [p["progress"]["task"] for p in found["processes"]] == [0, 1]
    assert [p["behind"] for p in found["processes"]] == [0, 3]
    assert (found["saved"]["what"], found["saved"]["step"]) == ("snapshot", 4)
    assert 0 <= found["saved"]["age"] < 60
    shown = status()
    assert "worker 0" in shown
    assert "in a step for" in shown
    assert "3 behind" in shown
    assert "snapshot of step 4, " in shown
    home = folder / "autograph-rewrite"
    assert stat.S_IMODE((home / str(job.pid)).stat().st_mode) == 0o700
    (folder / "end").touch()
    assert job.wait(60) == 0
    assert "no job" in status()
    assert list(home.iterdir()) == []


def test_metrics_are_read_on_loopback_only(folder: Path, start: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start("--metrics", str(port))
    jobs([5, 2])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'autograph_rewrite_steps_total{process="worker 0"} 5\n' in text
    assert 'autograph_rewrite_in_step{process="worker 1"} 1\n' in text
    assert "# TYPE autograph_rewrite_steps_total counter\n" in text
    assert 'autograph_rewrite_steps_behind{process="worker 1"} 3\n' in text
    assert 'autograph_rewrite_saved_step{what="snapshot"} 4\n' in text
    assert "# TYPE autograph_rewrite_saved_time_seconds gauge\n" in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=30)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_port_for_metrics_that_is_taken_is_an_error_at_the_start(folder: Path, start: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job = start("--metrics", str(taken.getsockname()[1]))
        assert job.wait(60) == 2
        assert "for metrics" in job.stderr.read()


def test_lines_as_objects_say_who_wrote_them_and_after_how_many_steps(folder: Path, start: Callable[..., Any]) -> None:
    (folder / "s.py").write_text(f"{STEPS}print('höre\\x1b[31m', file=sys.stderr)\nprint(step)\n")
    job = start("--log-format", "json")
    jobs([5, 2])
    (folder / "end").touch()
    out, err = job.communicate(timeout=60)
    said = {entry["process"]: entry for entry in map(json.loads, err.splitlines()) if "text" in entry}
    assert {name: (entry["steps"], entry["stream"]) for name, entry in said.items()} == {
        "worker 0": (5, "stderr"),
        "worker 1": (2, "stderr"),
    }
    assert said["worker 1"]["text"] == "höre\x1b[31m"
    assert "\x1b" not in err
    assert sorted(json.loads(line)["text"] for line in out.splitlines()) == ["1", "4"]


def test_what_a_killed_launcher_left_is_removed(folder: Path, start: Callable[..., Any]) -> None:
    job = start()
    jobs([5, 2])
    os.kill(job.pid, signal.SIGKILL)
    job.wait(30)
    assert (folder / "autograph-rewrite" / str(job.pid)).exists()
    assert "no job" in status()
    assert not (folder / "autograph-rewrite" / str(job.pid)).exists()
