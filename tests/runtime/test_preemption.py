"""Where a process stops that was asked to: between two steps of its loop, after what saves has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.errors import ConfigError, Preempted
from autograph_rewrite.runtime.checkpoints import Manifest, Pace
from autograph_rewrite.runtime.job.job_memory import Snapshot
from autograph_rewrite.runtime.job.signals import DEFAULT_GRACE, GRACE, grace
from autograph_rewrite.runtime.job.stop import Stop, is_wanted

HEARS = """\
import ctypes, os, signal, sys, threading
from autograph_rewrite.runtime.job.signals import listen
heard = threading.Event()
def told(number):
    print("heard", number, flush=True)
    heard.set()
    if sys.argv[1] == "blocked":
        os._exit(0)
assert listen(told)
if sys.argv[1] == "blocked":  # the main thread waits in C, and hears nothing
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))
    while True:
        ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))
child = os.fork()
if not child:
    signal.pause()
    os._exit(0)
os.kill(child, signal.SIGTERM)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), heard.wait(0.3), flush=True)
"""


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Return a stop that hears of no signals but those that a test makes up."""
    monkeypatch.setattr("autograph_rewrite.runtime.job.stop.listen", lambda told: True)
    monkeypatch.setenv(GRACE, "100000")  # at the deadline this process would end
    return Stop()


def stepped(stop: Stop, who: object, count: int = 1) -> None:
    for _ in range(count):
        with stop.step(who, None):
            pass


def asked(stop: Stop, number: int = signal.SIGTERM) -> None:
    """Ask a process to end, and wait until it knows where."""
    stop.notice(number)
    for thread in threading.enumerate():
        if thread.name == "autograph_stop":
            thread.join()


def test_a_process_ends_in_place_of_its_next_step_once_what_saves_has_saved(
    stop: Stop, capsys: pytest.CaptureFixture[str]
) -> None:
    stop.add(lambda: "all of it")
    stepped(stop, "train", 3)
    asked(stop)
    with pytest.raises(Preempted) as end, stop.step("train", None):
        pytest.fail("the step was begun")
    assert end.value.code == 143
    assert "the program ends after step 3, as SIGTERM asks for; saved all of it" in capsys.readouterr().err


def test_a_step_that_was_begun_is_finished(stop: Stop) -> None:
    done = []
    with stop.step("train", None):
        asked(stop)
        done.append(1)
    with pytest.raises(Preempted):
        stepped(stop, "train")
    assert done


def test_ctrl_c_is_a_keyboard_interrupt(stop: Stop) -> None:
    stepped(stop, "train")
    asked(stop, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stepped(stop, "train")


def test_of_functions_that_take_turns_only_the_first_begins_a_step(stop: Stop) -> None:
    for _ in range(4):
        stepped(stop, "discriminator", 5)
        stepped(stop, "generator")
    assert stop.steps == 20
    stepped(stop, "discriminator")
    asked(stop)
    stepped(stop, "generator")
    with pytest.raises(Preempted):
        stepped(stop, "discriminator")


def test_a_loop_that_follows_another_is_led_by_what_it_calls(stop: Stop) -> None:
    stepped(stop, "first", 2)
    stepped(stop, "second", 101)
    assert stop.steps == 3
    stop.begin_loop()
    stepped(stop, "third")
    assert stop.steps == 4


def test_several_calls_can_count_as_one_step(stop: Stop) -> None:
    for _ in range(3):
        with stop.one_step("fit"):
            stepped(stop, "inner", 4)
    assert stop.steps == 3
    asked(stop)
    with pytest.raises(Preempted), stop.one_step("fit"):
        pytest.fail("the step was begun")


def test_the_deadline_ends_what_never_comes_to_its_next_step(tmp_path: Path) -> None:
    program = """
import os, signal, time
from autograph_rewrite.runtime.job.stop import Stop
with Stop.here().step("train", None):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    done = python(program, tmp_path, environ={GRACE: "1"})
    assert done.returncode == 143
    assert "the program ends in step 1, as SIGTERM asks for, by force: it did not come to its next step" in done.stderr


def test_a_signal_is_heard_while_the_main_thread_is_not_in_python(tmp_path: Path) -> None:
    done = python(HEARS, tmp_path, "blocked")
    assert (done.returncode, done.stdout) == (0, "heard 15\n"), done.stderr


def test_a_forked_process_dies_of_its_own_signals_which_do_not_concern_its_parent(tmp_path: Path) -> None:
    done = python(HEARS, tmp_path, "forks")
    assert (done.returncode, done.stdout) == (0, "child -15 False\n"), done.stderr


def test_processes_of_jobs_and_of_the_launcher_stop_between_steps_and_no_others() -> None:
    assert is_wanted({GRACE: "5"})
    assert is_wanted({"TF_CONFIG": "{}"})
    assert is_wanted({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
    assert not is_wanted({"PATH": "/bin"})


def test_the_grace_time_is_a_number_of_seconds() -> None:
    assert (grace({}), grace({GRACE: "60"})) == (DEFAULT_GRACE, 60.0)
    with pytest.raises(ConfigError, match="AUTOGRAPH_GRACE is 'soon'"):
        grace({GRACE: "soon"})


def test_the_pace_of_checkpoints_tells_the_step_only_where_the_program_counts_steps() -> None:
    counts, epochs, adds, loops = Pace(), Pace(), Pace(), Pace()
    assert counts.step(7) is None
    counts.saved(100, 100, None)
    assert [counts.step(calls) for calls in (100, 123)] == [100, 123]
    counts.restored(manifest(200), 150)
    assert counts.step(151) == 201
    epochs.saved(1, 50, None)
    assert [epochs.step(calls) for calls in (50, 70)] == [1, None]
    adds.saved(10, 10, {"rate": 0.1})
    assert [adds.step(calls) for calls in (10, 11)] == [10, None]
    loops.saved(80, 10, None)
    assert loops.step(12) == 96


def manifest(step: int, steps_per_call: int = 0, **extra: float) -> Manifest:
    return Manifest(step, extra, steps_per_call, bytes=0, index="", sizes={})


def test_after_a_restore_the_pace_is_that_of_the_checkpoint_until_the_program_shows_another() -> None:
    counts, adds, unknown = Pace(), Pace(), Pace()
    counts.restored(manifest(80, 8), 0)
    assert [counts.step(calls) for calls in (0, 3)] == [80, 104]
    counts.saved(82, 2, None)
    assert counts.step(5) == 85
    adds.restored(manifest(80, 8, rate=0.1), 0)
    assert [adds.step(calls) for calls in (0, 3)] == [80, None]
    unknown.restored(manifest(80), 0)
    assert [unknown.step(calls) for calls in (0, 3)] == [80, None]


def test_the_snapshot_of_a_fit_comes_back_and_a_damaged_one_is_left_out(tmp_path: Path) -> None:
    from autograph_rewrite.runtime.keras_fit import SnapshotFile

    file = SnapshotFile(tmp_path / "backup" / "preempted-1.npz", None, 1.0)
    assert file.load("") is None
    file.save("", Snapshot({"epoch": 3}, [np.arange(4.0)]))
    found = file.load("")
    assert found is not None
    assert found.position == {"epoch": 3}
    np.testing.assert_array_equal(found.arrays[0], np.arange(4.0))
    file.path.write_bytes(file.path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match="is damaged, and left out"):
        assert file.load("") is None
    file.remove()
    assert not file.path.exists()


def python(program: str, folder: Path, *arguments: str, environ: dict[str, Any] | None = None) -> Any:
    """Run a program in a Python of its own, whose signals nobody ignores."""
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
