"""A process that the launcher forks: what it is sent."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

COUNTS = """
import os, signal, time
from autograph_rewrite.tools.launcher.forked import ForkedChild
from autograph_rewrite.tools.launcher.process import Task

def count(task):
    if not {is_ready}:
        time.sleep(60)  # it hears the signal before this line, or here: always before it listens for it
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    os.write(1, b"ready")
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:  # it is always ready to hear the next one
        pass
    return len(os.read(read, 100))

child = ForkedChild(Task("worker 0", ()), count)
if {is_ready}:
    os.read(child.pipes[0], 5)
child.send(signal.SIGINT)
while not child.has_ended():
    time.sleep(0.01)
print(child.code)
"""


@pytest.mark.parametrize(("is_ready", "code"), [(True, 1), (False, 130)], ids=["it runs", "it has not begun"])
def test_a_forked_process_hears_a_signal_once(
    is_ready: bool, code: int, fresh_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A second Ctrl-C is in a hurry: a worker that hears one twice ends by force, with nothing saved."""
    done = fresh_python(COUNTS.format(is_ready=is_ready))
    assert done.stdout == f"{code}\n", done.stderr


FAILS = """
import sys
from autograph_rewrite.tools.launcher.run_script import execute

try:
    execute({script!r}, [])
except Exception as error:
    assert sys.last_value is error
print(repr(sys.last_value))
"""


@pytest.mark.parametrize("error", ["ClusterError('gone')", "ValueError('bad')"])
def test_what_runs_at_the_end_of_a_script_sees_that_it_has_failed(
    error: str, tmp_path: Path, fresh_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Else it holds a stage for worker 0 as at a good end: a worker that missed it ended 8 s after it had said so."""
    script = tmp_path / "script.py"
    script.write_text(f"from autograph_rewrite.errors import ClusterError\nraise {error}\n")
    done = fresh_python(FAILS.format(script=str(script)))
    assert done.stdout == f"{error}\n", done.stderr
