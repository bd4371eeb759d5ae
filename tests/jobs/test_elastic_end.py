"""An elastic job that is asked to end leaves its last snapshot, from which the same command goes on; nothing else."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.programs.fixtures import Jobs, Once, until
from tests.jobs.programs.nursery import ROOT, Nursery, Worker
from tests.jobs.test_elastic import HEARTBEAT, LIMIT, PROGRAM, STEPS, assert_same, steps_of, undisturbed

LAUNCH = "tests/jobs/programs/launch.py"
BUSY = 4.0
"""Seconds more that a machine takes on which others run."""
STATUS = Path("autograph-rewrite")
"""The folder of all jobs of a user, which stays."""


def launched(jobs: Jobs, folder: Path, mode: str, workers: int, *options: str, **environ: str) -> Worker:
    """Start an elastic job that has a folder for its snapshots, and temporary files of its own."""
    (folder / "temporary").mkdir(exist_ok=True)
    own = {name: str(folder / "temporary") for name in ("TMPDIR", "XDG_RUNTIME_DIR")}
    line = ["--elastic", f"1:{workers}", "--heartbeat", HEARTBEAT, "--timeout", LIMIT - 20, "--grace", 15, *options]
    line += ["--snapshot-dir", folder / "kept", PROGRAM, mode, folder]
    return jobs.start(LAUNCH, *line, environ={**own, "PYTHONPATH": str(ROOT), **environ})


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("fit", signal.SIGTERM),
        ("function", signal.SIGINT),
        pytest.param("session", signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_job_that_is_asked_to_end_goes_on_with_fewer_workers_where_it_was(
    mode: str, number: int, jobs: Jobs, tmp_path: Path, once: Once, nursery: Nursery
) -> None:
    first = launched(jobs, tmp_path, mode, 2, PAUSE="0.2")
    until(lambda: "[worker 0] did 10\n" in first.output or first.code is not None, LIMIT)
    first.kill(number)
    assert first.wait(30) == 128 + number, first.output[-4000:]
    assert re.search(r"worker 0 ends after step \d+, as SIG\w+ asks for; saved a snapshot of", first.output), (
        first.output[-4000:]
    )
    assert f"[launch] the last snapshot is in {tmp_path}/kept" in first.output
    second = launched(jobs, tmp_path, mode, 1)
    assert second.wait(LIMIT) == 0, second.output[-4000:]
    assert f"[launch] goes on from the snapshot in {tmp_path}/kept" in second.output
    steps = steps_of(first.output), steps_of(second.output)
    assert steps[0] + steps[1] == list(STEPS[mode]), "none is skipped, and none is repeated"
    assert_same(tmp_path / "worker0.npz", undisturbed(once, nursery, mode))
    assert not list((tmp_path / "kept").iterdir()), "the job has come to its end"


def children_of(job: Worker) -> list[int]:
    """Return the processes of a launcher."""
    return [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def listening() -> dict[str, int]:
    """Return the ports of this machine at which somebody listens, by what the system calls their sockets."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    fields = [line.split() for line in lines]
    return {f"socket:[{each[9]}]": int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == "0A"}


def ports_of(pids: list[int]) -> set[int]:
    """Return the ports at which some processes listen."""
    ports = listening()
    links = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()}
    return {ports[link] for link in links if link in ports}


def test_a_job_that_is_ended_by_force_leaves_no_process_port_or_file(jobs: Jobs, tmp_path: Path) -> None:
    job = launched(jobs, tmp_path, "session", 2, "--grace", "1", PAUSE="0.2", PLAN="1:8:SIGSTOP")
    until(lambda: "lost by SIGSTOP" in job.output or job.code is not None, LIMIT)
    pids = children_of(job)
    ports = ports_of(pids)
    memory = {Path(found) for found in re.findall(r"memory (\S+)", job.output)}
    assert len(memory) == 1, job.output
    assert all(folder.is_dir() for folder in memory)
    began = time.monotonic()
    job.kill(signal.SIGTERM)
    assert job.wait(30) == 143, job.output[-4000:]
    assert time.monotonic() - began < 1 + BUSY
    assert "killed, as they had not ended by then: worker 1\n" in job.output
    assert (len(pids), len(ports)) == (2, 2)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not ports & set(listening().values())
    assert not [folder for folder in memory if folder.exists()]
    assert [p.relative_to(tmp_path / "temporary") for p in (tmp_path / "temporary").rglob("*")] == [STATUS]


def test_a_job_that_ignores_hangups_and_ctrl_c_ends_by_sigterm_only(jobs: Jobs, tmp_path: Path) -> None:
    job = launched(jobs, tmp_path, "session", 2, PAUSE="0.2", IGNORED="SIGHUP,SIGINT")
    until(lambda: "[worker 0] did 3\n" in job.output or job.code is not None, LIMIT)
    for number in (signal.SIGHUP, signal.SIGINT):
        job.kill(number)
    until(lambda: "[worker 0] did 6\n" in job.output or job.code is not None, LIMIT)
    assert job.code is None, job.output[-4000:]
    for pid in children_of(job):  # as from a terminal that is closed
        os.kill(pid, signal.SIGHUP)
    until(lambda: "[worker 0] did 9\n" in job.output or job.code is not None, LIMIT)
    assert job.code is None, job.output[-4000:]
    job.kill(signal.SIGTERM)
    assert job.wait(30) == 143, job.output[-4000:]
    assert "saved a snapshot of step" in job.output
