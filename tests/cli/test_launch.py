"""`launch` and `run --restart`: many processes live and die as one, and nothing of them is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autograph_rewrite.cluster.membership import membership_of
from autograph_rewrite.config.config import Config

COMMAND = [sys.executable, "-m", "autograph_rewrite.tools.cli"]
TIMEOUT = 60
WHO = """\
import json, os, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']} {task['index']}"
restart = int(os.environ["AUTOGRAPH_RESTART"])
def wait():
    open(f"{name}.{restart}.pid", "w").write(str(os.getpid()))
    print("waits", flush=True)
    time.sleep(100)
def meet(count):  # a server is ended with the last worker, whatever it still wanted to say
    open(f"{name}.here", "w").close()
    while len([path for path in os.listdir(".") if path.endswith(".here")]) < count:
        time.sleep(0.02)
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("TF_CONFIG", "AUTOGRAPH_REWRITE_CONFIG", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def launch(folder: Path) -> Launch:
    """Return a function that writes a script and launches it."""

    def run(options: str, source: str, *arguments: str, verb: str = "launch") -> subprocess.CompletedProcess[str]:
        (folder / "s.py").write_text(WHO + source if verb == "launch" else source)
        line = [*COMMAND, verb, *options.split(), "s.py", *arguments]
        return subprocess.run(
            line, input="for the launcher", capture_output=True, text=True, timeout=TIMEOUT, check=False
        )

    return run


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[[str, str, int], subprocess.Popen[str]]]:
    """Return a function that launches a script and comes back when so many processes wait in it."""
    running = []

    def start(options: str, source: str, waiting: int) -> subprocess.Popen[str]:
        (folder / "s.py").write_text(WHO + source)
        line = [*COMMAND, "launch", *options.split(), "s.py"]
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        until(lambda: len(pids(folder)) == waiting)
        return running[0]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def pids(folder: Path, pattern: str = "*.pid") -> list[int]:
    """Return the numbers of the processes that have written theirs."""
    return [int(text) for path in folder.glob(pattern) if (text := path.read_text())]


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie that its new parent has not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(reached: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.02)


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what --json printed: the last line of stdout."""
    data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return data


def test_each_process_learns_who_it_is_and_every_line_says_whose_it_is(launch: Launch) -> None:
    source = """
print(os.environ["TF_CONFIG"])
print(sys.argv, "for the launcher" in sys.stdin.read(), restart, file=sys.stderr)
meet(3)
"""
    done = launch("-n 2 --ps 1", source, "--steps", "3")
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"^\[(.+?)\] (.*)$", done.stdout, re.MULTILINE))
    assert set(said) == {"worker 0", "worker 1", "ps 0"}
    members = [membership_of(Config(), {"TF_CONFIG": text}) for text in said.values()]
    assert [member.name for member in members if member] == list(said)
    assert len({member.addresses for member in members if member}) == 1
    assert all(address.startswith("127.0.0.1:") for member in members if member for address in member.addresses)
    errors = re.findall(r"^\[(.+?)\] (.*)$", done.stderr, re.MULTILINE)
    assert sorted(errors) == [(name, "['s.py', '--steps', '3'] False 0") for name in sorted(said)]


def test_the_first_failure_ends_all_others_and_is_told_at_the_end(launch: Launch, folder: Path) -> None:
    source = """
if name != "worker 1":
    wait()
while len([path for path in os.listdir(".") if path.endswith(".pid")]) < 2:
    time.sleep(0.02)
print("lost the data", file=sys.stderr)
sys.exit(3)
"""
    began = time.monotonic()
    done = launch("-n 3 --json", source)
    assert done.returncode == 3
    assert done.stderr.endswith(
        "[launch] worker 1 failed with exit code 3; the end of its stderr:\n    lost the data\n"
    )
    assert not any(map(is_alive, pids(folder)))
    assert time.monotonic() - began < 20
    told = summary(done)
    assert (told["exit_code"], told["failed"], told["restarts"], told["timed_out"]) == (3, "worker 1", 0, False)
    assert [process["signal"] for process in told["processes"]] == ["SIGTERM", None, "SIGTERM"]
    assert [process["exit_code"] for process in told["processes"]] == [None, 3, None]


def test_an_error_of_ours_is_told_without_a_traceback_as_run_does(launch: Launch) -> None:
    done = launch("-n 1", "import autograph_rewrite as ar\nraise ar.ClusterError('worker 1 is missing')")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("the end of its stderr:\n    ClusterError: worker 1 is missing\n")


def test_who_is_killed_is_code_1_and_named_with_the_signal(launch: Launch) -> None:
    done = launch("-n 2", "os.kill(os.getpid(), signal.SIGSEGV) if name == 'worker 0' else wait()")
    assert done.returncode == 1
    assert "[launch] worker 0 was killed by SIGSEGV\n" in done.stderr


def test_who_leaves_blank_lines_alone_has_said_nothing(launch: Launch) -> None:
    done = launch("-n 1", "sys.stderr.write('\\n\\n')\nsys.stderr.flush()\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.stderr.endswith("worker 0 was killed by SIGKILL; the end of its stderr:\n    (nothing)\n")


def test_who_does_not_listen_to_sigterm_is_killed(launch: Launch, folder: Path) -> None:
    source = """
if name == "worker 0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()
while not os.path.exists("worker 0.0.pid"):
    time.sleep(0.02)
sys.exit(4)
"""
    done = launch("-n 2 --grace 0.3 --json", source)
    assert done.returncode == 4
    assert summary(done)["processes"][0]["signal"] == "SIGKILL"
    assert not any(map(is_alive, pids(folder)))


GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open(f"{name}.child.pid", "w").write(str(child.pid))
"""


def test_what_a_process_leaves_behind_is_ended_with_it(launch: Launch, folder: Path) -> None:
    done = launch("-n 2", GRANDCHILD)
    assert done.returncode == 0
    assert len(pids(folder)) == 2
    assert not any(map(is_alive, pids(folder)))


def test_a_process_that_fled_from_its_group_does_not_hold_the_launcher(launch: Launch, folder: Path) -> None:
    done = launch("-n 1", GRANDCHILD.replace("]", "], start_new_session=True", 1))
    assert done.returncode == 0
    for pid in pids(folder):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_ends_everything(
    started: Callable[..., subprocess.Popen[str]], folder: Path, number: int, code: int
) -> None:
    process = started("-n 2 --ps 1 --restart 5", GRANDCHILD + "wait()", 6)
    process.send_signal(number)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code
    assert f"[launch] stopped by {signal.Signals(number).name}\n" in err
    assert sorted(out.splitlines()) == ["[ps 0] waits", "[worker 0] waits", "[worker 1] waits"]
    assert ("interrupted" in err) == (number == signal.SIGINT)  # processes can tidy up, as without the launcher
    assert not any(map(is_alive, pids(folder)))


def test_a_second_signal_waits_for_nobody(started: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    source = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwait()"
    process = started("-n 2 --grace 100", source, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert not any(map(is_alive, pids(folder)))


def test_processes_end_when_the_launcher_is_killed(started: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    process = started("-n 2 --ps 1", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait()", 3)
    process.kill()
    process.wait()
    until(lambda: not any(map(is_alive, pids(folder))))


def test_a_job_whose_worker_is_killed_starts_anew(started: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    process = started("-n 2 --restart 2 --json", "wait() if restart == 0 else print('done', restart)", 2)
    os.kill(pids(folder, "worker 1.0.pid")[0], signal.SIGKILL)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "[launch] worker 1 was killed by SIGKILL: restart 1 of 2\n" in err
    assert {"[worker 0] done 1", "[worker 1] done 1"} <= set(out.splitlines())
    assert json.loads(out.splitlines()[-1])["restarts"] == 1
    assert not any(map(is_alive, pids(folder)))


def test_restarts_are_counted_and_end(launch: Launch) -> None:
    done = launch("-n 1 --restart 2 --json", "print('try', restart); sys.exit(7)")
    assert done.returncode == 7
    assert [line for line in done.stdout.splitlines() if "try" in line] == [f"[worker 0] try {i}" for i in range(3)]
    assert summary(done)["restarts"] == 2


def test_parameter_servers_end_with_the_last_worker(launch: Launch, folder: Path) -> None:
    done = launch("-n 2 --ps 2 --json", "wait() if name.startswith('ps') else time.sleep(0.3)")
    assert done.returncode == 0
    assert [process["name"] for process in summary(done)["processes"]] == ["worker 0", "worker 1", "ps 0", "ps 1"]
    assert not any(map(is_alive, pids(folder)))


def test_a_parameter_server_that_fails_fails_the_job(launch: Launch) -> None:
    done = launch("-n 1 --ps 1", "sys.exit(5) if name == 'ps 0' else wait()")
    assert done.returncode == 5
    assert "[launch] ps 0 failed with exit code 5\n" in done.stderr


def test_a_job_that_takes_too_long_is_ended_and_says_who_ran(launch: Launch, folder: Path) -> None:
    done = launch("-n 2 --timeout 1.5 --restart 3 --json", "wait() if name == 'worker 1' else None")
    assert done.returncode == 124
    assert "[launch] not done after 1.5 s; still running: worker 1\n" in done.stderr
    assert summary(done)["timed_out"]
    assert not any(map(is_alive, pids(folder)))


def test_a_configuration_reaches_the_script_and_says_how_many_there_are(launch: Launch, folder: Path) -> None:
    (folder / "c.yaml").write_text("cluster: {workers: ['h:1', 'h:2'], ps: ['h:3']}\n")
    source = "print(os.environ['AUTOGRAPH_REWRITE_CONFIG']); meet(3)"
    done = launch("--config c.yaml", source)
    assert done.returncode == 0, done.stderr
    path = folder / "c.yaml"
    assert sorted(done.stdout.splitlines()) == [f"[{name}] {path}" for name in ("ps 0", "worker 0", "worker 1")]
    for options, words in (("-n 3", "-n is 3, but the configuration names 2"), ("--ps 0", "--ps is 0")):
        done = launch(f"{options} --config c.yaml", source)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert "c.yaml:1" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "say -n W"),
        ("-n 0", "'0' is no whole number from 1 on"),
        ("-n 2 --ps -1", "--ps"),
        ("-n 2 --port 65537", "'65537' is no port"),
        ("-n 2 --timeout 0", "'0' is no number of seconds"),
        ("-n 2 --config ghost.yaml", "ghost.yaml"),
        ("-n 2 ghost.py", "there is no script 'ghost.py'"),
        ("-n 2 -m gh.ost", "there is no module 'gh.ost'"),
    ],
)
def test_bad_usage_is_code_2_and_starts_nothing(launch: Launch, folder: Path, options: str, words: str) -> None:
    done = launch(options, "wait()")
    assert done.returncode == 2
    assert words in done.stderr
    assert pids(folder) == []


def test_a_module_is_launched_by_its_name(folder: Path) -> None:
    package = folder / "pkg"
    package.mkdir()
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv)")
    line = [*COMMAND, "launch", "-n", "1", "-m", "pkg.train", "-n", "5"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == f"[worker 0] __main__ pkg {[str(package / 'train.py'), '-n', '5']}\n"


def test_logs_keep_what_each_process_wrote(launch: Launch, folder: Path) -> None:
    done = launch("-n 2 --ps 1 --restart 1 --log-dir logs/here", "print('o'); print('e', file=sys.stderr); sys.exit(1)")
    assert done.returncode == 1
    logs = {path.name: path.read_text() for path in (folder / "logs" / "here").iterdir()}
    assert set(logs) == {"worker-0.log", "worker-1.log", "ps-0.log"}
    failed = re.findall(r"\[launch\] (\w+ \d) failed", done.stderr)[0].replace(" ", "-")
    first, _, second = logs[f"{failed}.log"].partition("--- started again ---\n")
    assert sorted(first.split()) == ["e", "o"]
    assert set(second.split()) <= {"e", "o"}


def test_a_port_that_somebody_took_is_worth_another_try(launch: Launch, folder: Path) -> None:
    """The ports were free when they were chosen; that is no promise."""
    source = """
said = os.environ["TF_CONFIG"]
print(said)
if '"type": "worker"' in said and not os.path.exists("tried"):  # a job is done when its workers are
    open("tried", "w")
    sys.exit("UnknownError: Could not start gRPC server")
"""
    done = launch("-n 1 --ps 1 --json", source)
    assert done.returncode == 0
    assert "found its port taken: starting again on other ports\n" in done.stderr
    assert summary(done)["restarts"] == 0
    assert len(set(re.findall(r"127[\d.]+:\d+", done.stdout))) == 4
    (folder / "tried").unlink()
    assert launch("-n 1 --port 39517", source).returncode == 1  # other ports were not asked for


def test_the_ports_can_be_given_and_a_taken_one_is_named(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch(f"-n 2 --port {port - 1}", "print('never')")
    assert done.returncode == 2
    assert f"cannot use port {port}: Address already in use" in done.stderr
    assert "never" not in done.stdout


def test_pinned_processes_have_a_core_each(launch: Launch) -> None:
    done = launch("-n 3 --pin", "print(os.sched_getaffinity(0))")
    cores = sorted(os.sched_getaffinity(0))
    expected = [f"[worker {i}] {{{cores[i % len(cores)]}}}" for i in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


def test_run_starts_one_process_again_and_leaves_its_output_alone(launch: Launch) -> None:
    source = """
import os, sys
count = int(os.environ["AUTOGRAPH_RESTART"])
print("try", count, sys.argv, "TF_CONFIG" in os.environ, flush=True)
if count < 2:
    os.kill(os.getpid(), 9)
sys.exit(6)
"""
    done = launch("--restart 2 --json", source, "--x", verb="run")
    assert done.returncode == 6
    assert done.stdout.splitlines()[:-1] == [f"try {i} ['s.py', '--x'] False" for i in range(3)]
    assert "[run] the script was killed by SIGKILL: restart 2 of 2\n" in done.stderr
    assert done.stderr.endswith("[run] the script failed with exit code 6\n")
    assert summary(done)["restarts"] == 2


def test_the_launcher_imports_no_tensorflow_and_has_one_thread(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    (folder / "s.py").write_text("")
    done = fresh_python(
        "import os, sys\n"
        "from autograph_rewrite.tools import cli\n"
        "assert cli.main(['launch', '-n', '1', 's.py']) == 0\n"
        "print('tensorflow' in sys.modules, len(os.listdir('/proc/self/task')))\n"
    )
    assert done.stdout == "False 1\n", done.stderr
