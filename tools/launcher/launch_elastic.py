"""Run an elastic job, or this host's part of an elastic job on several hosts."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.cluster.membership import Membership, all_members
from autograph_rewrite.diagnostics.amounts import several
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.runtime.job.job_memory import EXPELLED, RANK, JobMemory, OwnedMemory
from autograph_rewrite.tools.launcher import agent_view
from autograph_rewrite.tools.launcher.agent_arguments import TOKEN
from autograph_rewrite.tools.launcher.agent_meeting import AgentMeeting, Way
from autograph_rewrite.tools.launcher.forked import ForkedChild, import_once, run_script
from autograph_rewrite.tools.launcher.job import (
    EndReason,
    JobSummary,
    LaunchOptions,
    Manner,
    Outcome,
    Signals,
    exit_code,
    explain,
    noted_signals,
    say,
    start,
)
from autograph_rewrite.tools.launcher.process import StartedProcess, Task
from autograph_rewrite.tools.launcher.script import environment

Made = Callable[[Sequence[Membership], Mapping[str, str], tuple[str, ...]], list[Task]]


def run_elastic(
    args: argparse.Namespace, made: Made, ports: agent_view.Ports, options: LaunchOptions
) -> dict[str, Any]:
    """Run a job that continues after workers are lost; return the summary.

    Args:
        made: makes processes, given their memberships, environment variables and command.
    """
    least, most = args.elastic
    bounds = agent_view.Bounds(least, most, args.heartbeat)

    def tasks(part: agent_view.Part, memory: JobMemory) -> list[Task]:
        given = {**environment(args, memory.generation - 1, args.grace), **memory.environment}
        everybody = all_members(part.addresses, part.workers)
        mine = [m for m in everybody if (m.task in part.ranks if m.is_worker else part.serves)]
        processes = made(mine, given, (args.script, *args.args))
        return [
            replace(task, environment={**task.environment, RANK: str(member.index)})
            for member, task in zip(mine, processes, strict=True)
        ]

    kept = KeptSnapshots(args.snapshot_dir) if args.snapshot_dir is not None else None
    import_once()
    with OwnedMemory() as owned:
        if kept is not None and kept.restore(owned.folder):
            say(options, f"goes on from the snapshot in {args.snapshot_dir}")
        group: Group
        if args.rdzv_endpoint:
            token = os.environ.pop(TOKEN).encode()  # scripts have no use for it
            way = Way(args.rdzv_endpoint, token, args.address, args.rdzv_wait, args.rdzv_timeout)
            seat = agent_view.Seat("", "", args.nproc_per_node)
            group = AgentMeeting(way, bounds, seat, owned, ports, functools.partial(say, options))
            group.restarts, group.auxiliary = args.restart, args.ps or 0
        else:
            group = OnlyAgent(bounds, args.restart, args.ps or 0, ports)
        body = functools.partial(run_script, heartbeat=args.heartbeat, module=args.module)
        job = Elastic(tasks, body, options, args.heartbeat, group, owned)
        summary = job.run()
        if kept is not None and not summary.exit_code:
            kept.clear()
        elif kept is not None and kept.keep(owned.folder):
            say(options, f"the last snapshot is in {args.snapshot_dir}: the same command goes on from there")
    return {**summary.data(), "generations": [generation.data() for generation in job.generations]}


# Run an elastic job: if a worker is lost, the others continue as the next generation, from a snapshot in memory.
#
#     generation 1   worker 0   worker 1 ✕   worker 2       killed, stopped, or blamed by workers that waited for it
#                        ▼                       ▼          all are ended, so that an expelled worker cannot write
#     generation 2   worker 0                worker 1       forked, with TensorFlow imported; the script runs again and
#                                                           is at the snapshot before its first step
#
# A lost worker is replaced at the end of an epoch, up to the number of restarts; at once if too few would be left. The
# `Group` decides who continues: the launcher alone, or together with those of other hosts.


STOPPED, SILENT = 2.5, 10.0
"""Heartbeat intervals without a sign of life after which a worker is lost: a stopped worker, any other worker.

With half an interval to notice it, a stopped worker is ended within three intervals."""


@dataclass
class Generation:
    """The history of one generation, for the summary."""

    number: int
    workers: int
    began: float = field(default_factory=time.time)
    stepped: float | None = None
    ended: float | None = None
    why: str = ""
    silent: float = 0.0

    def data(self) -> dict[str, Any]:
        """Return it as plain data: when it began and ended, seconds to its first step, and why it ended."""
        to_step = round(self.stepped - self.began, 3) if self.stepped is not None else None
        found = {"number": self.number, "workers": self.workers, "began": self.began, "ended": self.ended}
        return {**found, "to_first_step": to_step, "why": self.why, "silent": round(self.silent, 3)}


@dataclass
class Elastic:
    """Runs one host's part of an elastic job, once TensorFlow is imported.

    Attributes:
        tasks: makes the processes of a generation, given this host's part of it and its memory.
        body: the function that each process runs.
        heartbeat: seconds between two heartbeats of a worker.
        group: decides who continues.
        owned: the memory of the job on this host.
    """

    tasks: Callable[[agent_view.Part, JobMemory], Sequence[Task]]
    body: Callable[[Task], int]
    options: LaunchOptions
    heartbeat: float
    group: Group
    owned: OwnedMemory
    generations: list[Generation] = field(default_factory=list)

    def run(self) -> JobSummary:
        """Run the job to its end."""
        began = time.monotonic()
        deadline = None if self.options.timeout is None else began + self.options.timeout
        with noted_signals() as signals, _noted_requests(self.group):
            try:
                outcome = self._generations(signals, deadline)
            finally:
                self.group.leave()
        explain(outcome, self.options, signals.received)
        code = exit_code(outcome, signals.received) if outcome.reason is None or signals.received else 1
        return JobSummary(code, max(0, len(self.generations) - 1), time.monotonic() - began, outcome)

    def _generations(self, signals: Signals, deadline: float | None) -> Outcome:
        group, outcome, report = self.group, Outcome({}), None
        while True:
            number = len(self.generations)
            part = group.meet(report, lambda: signals.received is not None or _is_over(deadline))
            if number:
                is_next = part is None or part.generation == self.generations[-1].number + 1
                self.generations[-1].why = group.why if is_next else "the others went on without this host"
            if part is None:
                if _is_over(deadline):
                    return replace(outcome, late=("the other hosts",))
                if group.why and outcome.failed is None and signals.received is None:
                    say(self.options, group.why)
                    return replace(outcome, reason=EndReason(group.why))
                return outcome
            if number:
                counted = several(part.workers, "worker")
                say(self.options, f"{group.why}: generation {part.generation} goes on with {counted}")
            outcome, report = self._run(part, signals, deadline)
            if signals.received is not None or outcome.late:
                return outcome

    def _run(
        self, part: agent_view.Part, signals: Signals, deadline: float | None
    ) -> tuple[Outcome, agent_view.HostReport]:
        """Run this host's part of a generation; return its end for the launcher and its report for the group."""
        memory = self.owned.begin(part.generation, part.lease)
        mine = Generation(part.generation, part.workers)
        self.generations.append(mine)
        manner = Manner(
            start=lambda task, _: ForkedChild(task, self.body),
            look=lambda running: self._look(running, memory),
            is_hasty=True,
        )
        is_first = len(self.generations) == 1
        outcome = start(self.tasks(part, memory), self.options, signals, deadline, is_first=is_first, manner=manner)
        mine.ended, mine.stepped = time.time(), memory.stepped
        return outcome, report_of(outcome, memory)

    def _look(self, running: Sequence[StartedProcess], memory: JobMemory) -> EndReason | None:
        """Return why the generation must end: a silent worker, a message of another host, or workers that can join."""
        for child in running:
            silence, is_stopped = memory.silence(int(child.task.environment[RANK])), child.is_stopped()
            if silence > (STOPPED if is_stopped else SILENT) * self.heartbeat:
                self.generations[-1].silent = silence
                how = "is stopped" if is_stopped else "gives no sign of life"
                return EndReason(f"{child.task.name} {how}", child.task.name)
        told = self.group.look(memory)
        if told is not None:
            return EndReason(told)
        return EndReason("others can join") if memory.waits else None


def report_of(outcome: Outcome, memory: JobMemory) -> agent_view.HostReport:
    """Return the report for the other hosts on this host's part of a generation."""
    reason, failed, has_stepped = outcome.reason, outcome.failed or "", memory.stepped is not None
    joins = reason is not None and memory.waits
    is_told = reason is not None and reason.lost is None and not joins
    is_refused = memory.is_refused and outcome.codes.get(failed, 0) > 0  # no worker is lost; the job ends by that error
    if is_told or is_refused:
        return agent_view.HostReport(has_stepped=has_stepped)
    if not failed and not joins:
        return agent_view.HostReport(ended_well=not outcome.late, has_stepped=has_stepped)
    alive = [
        int(name.removeprefix(agent_view.WORKER))
        for name, code in outcome.codes.items()
        if name.startswith(agent_view.WORKER) and code not in (-signal.SIGKILL, EXPELLED)
    ]
    was_killed = reason is not None or outcome.codes.get(failed, 0) <= 0
    blames = {str(rank): memory.blamed(rank) for rank in alive}
    return agent_view.HostReport(outcome.problem, failed, was_killed, joins, False, has_stepped, blames)


@contextmanager
def _noted_requests(group: Group) -> Iterator[None]:
    """Handle SIGUSR1 as the request for the largest number of workers."""

    def note(_: int, __: FrameType | None) -> None:
        group.request()

    before = signal.signal(signal.SIGUSR1, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


# A job on one host: its launcher decides alone who continues.


class OnlyAgent:
    """The only agent of a job.

    Args:
        restarts: how many workers may be restarted.
        auxiliary: the number of auxiliary processes.
    """

    def __init__(self, bounds: agent_view.Bounds, restarts: int, auxiliary: int, ports: agent_view.Ports) -> None:
        self._bounds, self._auxiliary, self._ports = bounds, auxiliary, ports
        self._seat = agent_view.Seat("", LOOPBACK, bounds.most)
        self._view = agent_view.GenerationHosts(restarts=restarts)
        self.why = ""

    def meet(self, report: agent_view.HostReport | None, impatient: Callable[[], bool]) -> agent_view.Part | None:
        """Decide how many workers continue; None: the job is over."""
        self.why = ""
        if report is not None and not report.words:
            return None
        lost = agent_view.losses([report] if report is not None else [])
        self.why = lost.words
        has_stepped = report is not None and report.has_stepped
        view = agent_view.following(self._view, lost, has_stepped, [self._seat], self._bounds)
        if view is None:
            return None
        self._view = view
        addresses = [f"{LOOPBACK}:{port}" for port in self._ports(view.workers + self._auxiliary)]
        return agent_view.Part(view.generation, range(view.workers), tuple(addresses), view.workers)

    def look(self, memory: JobMemory) -> str | None:
        """Let worker 0 stop for workers that can join, if there are any."""
        if not memory.lets_join and agent_view.can_join(self._view, (), self._bounds):
            memory.let_join()
        return None

    def request(self) -> None:
        """Let all lost workers join again."""
        self._view = agent_view.asked_for_more(self._view)

    def leave(self) -> None:
        """Do nothing, because there are no other agents."""


Group = AgentMeeting | OnlyAgent
"""An agent of a job."""


# The folder in which an elastic job that is ended early keeps its snapshots, from which the next job continues.
#
#     launch --elastic 2:4 --snapshot-dir kept train.py     SIGTERM ─► the last snapshot ─► kept/000001/loop.npz, seed
#     the same command                                      begins at that step; at its end kept/ is empty
#
# A folder is written under a temporary name and renamed, so that each one is complete; then the older one is removed.

_COMING = ".coming"


class KeptSnapshots:
    """The folder of kept snapshots.

    Args:
        path: it is created if it does not exist.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {path}: {error.strerror}", where="--snapshot-dir") from None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"the folder {path} cannot be written", where="--snapshot-dir")

    def restore(self, memory: Path) -> bool:
        """Copy the snapshots of an earlier job into the folder of this job's memory; return whether there were any."""
        whole = self._whole()
        if not whole:
            return False
        for file in whole[-1].iterdir():
            shutil.copyfile(file, memory / file.name)
        return True

    def keep(self, memory: Path) -> bool:
        """Keep the snapshots of a job that was ended early; return whether there were any."""
        snapshots = [file for file in memory.glob("*.npz") if not file.name.startswith(("new-", "coming-"))]
        if not snapshots:
            return False
        before = self._whole()
        number = int(before[-1].name) + 1 if before else 1
        coming = self._path / f"{number:06}{_COMING}"
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir(mode=0o700)
        for file in (*snapshots, memory / "seed"):
            shutil.copyfile(file, coming / file.name)
        coming.rename(self._path / f"{number:06}")
        self._remove(before)
        return True

    def clear(self) -> None:
        """Remove all kept snapshots, because the job has finished."""
        self._remove([*self._whole(), *self._path.glob(f"*{_COMING}")])

    def _whole(self) -> list[Path]:
        """Return the complete folders, the newest last."""
        return sorted(entry for entry in self._path.iterdir() if entry.name.isdecimal() and entry.is_dir())

    def _remove(self, entries: list[Path]) -> None:
        for entry in entries:
            shutil.rmtree(entry, ignore_errors=True)
