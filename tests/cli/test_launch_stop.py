"""How `launch` begins and ends its processes: joined before the script, and servers after the workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch"]


def launched(folder: Path, options: str, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "s.py").write_text(f"import json, os, signal, sys, time\n{source}")
    environ = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "FORCE_COLOR")}
    line = [*COMMAND, *options.split(), "s.py"]
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_will_join_before_the_script_imports_the_package_which_costs_no_tensorflow(tmp_path: Path) -> None:
    source = """
hooked = any(type(finder).__module__.endswith("join_on_import") for finder in sys.meta_path)
print(hooked, "tensorflow" in sys.modules, "numpy" in sys.modules)
"""
    done = launched(tmp_path, "-n 2", source)
    assert sorted(done.stdout.splitlines()) == [f"[worker {n}] True False False" for n in range(2)], done.stderr


def test_servers_are_ended_after_the_workers_which_may_have_something_to_save(tmp_path: Path) -> None:
    source = """
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker":
    def end(*_):
        time.sleep(0.5)
        print("the server lives:", os.readlink(f"/proc/{server}/exe") != "", flush=True)
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    while not os.path.exists("pid"):
        time.sleep(0.02)
    server = open("pid").read()
    os.kill(os.getppid(), signal.SIGTERM)
else:
    open("new", "w").write(str(os.getpid()))
    os.rename("new", "pid")
time.sleep(100)
"""
    done = launched(tmp_path, "-n 1 --ps 1", source)
    assert (done.returncode, done.stdout) == (143, "[worker 0] the server lives: True\n"), done.stderr
    assert done.stderr == "[launch] stopped by SIGTERM\n"


def test_who_does_not_end_in_time_is_killed_and_named(tmp_path: Path) -> None:
    source = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(100)
"""
    done = launched(tmp_path, "-n 1 --grace 0.5", source)
    assert done.returncode == 143
    assert done.stderr == "[launch] stopped by SIGTERM; killed, as they had not ended by then: worker 0\n"
