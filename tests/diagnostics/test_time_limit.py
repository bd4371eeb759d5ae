"""The time that reading takes has a limit, which ends it in words, in any thread, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.diagnostics.limits import VARIABLE, in_time
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.load import files


def endless() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pytest.fail("it looks like an error of what is read")


def waiting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "time_limit"]


def test_what_takes_too_long_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "seconds=1")

    def refused() -> float:
        began = time.perf_counter()
        with pytest.raises(ConfigError, match=r"x\.yaml: reading takes longer than 1 s \(.*LIMITS: seconds\)"):
            in_time(endless, name="x.yaml", error=ConfigError)
        return time.perf_counter() - began

    assert refused() < 10
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(refused).result() < 10


def test_what_is_in_time_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "seconds=1")
    assert in_time(lambda: 7, name="x", error=ConfigError) == 7
    with pytest.raises(KeyError):
        in_time(lambda: {"b": 1}["a"], name="x", error=ConfigError)
    for thread in waiting():
        thread.join(10)
    assert not waiting()
    time.sleep(1.5)  # nothing interrupts what comes later


def test_an_interruption_that_is_lost_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "seconds=1")
    lost: list[int] = []

    def swallows() -> None:
        while True:
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                if lost:
                    raise
                lost.append(1)

    with pytest.raises(ConfigError, match="longer than 1 s"):
        in_time(swallows, name="x", error=ConfigError)
    assert lost


def test_graphs_configurations_and_plans_are_read_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "seconds=1")
    (tmp_path / "g.pb").write_bytes(b"\n\x05\n\x01a\x12\x04NoOp")
    monkeypatch.setattr(files, "_from_binary", lambda *_: endless())
    with pytest.raises(GraphError, match=r"g\.pb: reading takes longer"):
        ar.GraphItem.load(str(tmp_path / "g.pb"))
    monkeypatch.setattr("autograph_rewrite.diagnostics.located_yaml.parse_yaml", lambda *_, **__: endless())
    (tmp_path / "c.yaml").write_text("devices: [CPU:0]")
    with pytest.raises(ConfigError, match=r"c\.yaml: reading takes longer"):
        ar.Config.load(tmp_path / "c.yaml")
    monkeypatch.setattr(ar.Plan, "from_proto", lambda *_, **__: endless())
    (tmp_path / "p.pb").write_bytes(b"")
    with pytest.raises(ar.PlanError, match=r"p\.pb: reading takes longer"):
        ar.Plan.load(tmp_path / "p.pb")


PROFILED = """
import cProfile
from autograph_rewrite.diagnostics.limits import in_time
from autograph_rewrite.errors import ConfigError

def forever():
    while True:
        pass

for read in (int, forever):
    try:
        in_time(read, name="x", error=ConfigError)
    except ConfigError:
        print("ended")
    cProfile.run("sum(map(abs, range(9)))")
"""


def test_a_profiler_works_after_what_was_read_in_time_and_after_what_was_not() -> None:
    """An interruption that is cancelled instead of taken asks the interpreter for ever to look, and hangs profilers."""
    environ = {**os.environ, VARIABLE: "seconds=1"}
    done = subprocess.run(
        [sys.executable, "-c", PROFILED], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("ended") == 1
    assert done.stdout.count("function calls") == 2
