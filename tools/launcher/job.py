"""Run the processes of a job together: the first failure ends all of them, and the job is restarted.

start ──► wait ──► every worker ended with 0 ─────────────────────► end the servers: success
           │
           ├────► one failed ──► end the others ──► restarts left? ──► start
           │                                             └─► no: its exit code
           └────► Ctrl-C, SIGTERM, timeout ──► end all: 130, 143, 124
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from autograph_rewrite.tools.launcher.output import Form, Output, opened
from autograph_rewrite.tools.launcher.process import Child, StartedProcess, Task

# One attempt to run a job: all processes started, until all have ended, one has failed, or a stop was requested.
#
# There is one thread and no callbacks: it waits for output, checks which processes have ended, and decides.

# The most time until the end of a process without pipes, or a signal to the launcher, is noticed.
_TICK_SECONDS = 0.05
# How long to wait for pipes to close after their processes have ended: a child that left its group may hold them open.
_DRAIN_SECONDS = 1.0
_READ_BYTES = 1 << 16

# Messages of TensorFlow's server, and of other servers, if their port is taken.
_PORT_TAKEN = ("could not start grpc server", "address already in use")


@dataclass(frozen=True)
class Outcome:
    """How one start of a job ended."""

    codes: dict[str, int]
    """The exit code of each process; negative: the signal that killed it."""
    failed: str | None = None
    """The process that failed first, because of which the others were ended."""
    last_lines: tuple[str, ...] = ()
    """The last lines of its stderr."""
    late: tuple[str, ...] = ()
    """The processes that were still running at the deadline."""
    reason: EndReason | None = None
    """Why the job was ended, if no process failed."""
    killed: tuple[str, ...] = ()
    """The processes that did not end within the grace period."""

    @property
    def problem(self) -> str:
        """The reason, or what happened to the failed process."""
        if self.reason is not None:
            return self.reason.words
        assert self.failed is not None
        code = self.codes[self.failed]
        return f"{self.failed} " + (
            f"failed with exit code {code}" if code > 0 else f"was killed by {signal_name(-code)}"
        )

    @property
    def port_was_taken(self) -> bool:
        """Whether a process failed because its port was taken."""
        text = "\n".join(self.last_lines).lower()
        return any(words in text for words in _PORT_TAKEN)


@dataclass(frozen=True)
class EndReason:
    """Why an attempt must end although no process has failed."""

    words: str
    lost: str | None = None
    """The process that is lost."""


@dataclass(frozen=True)
class Manner:
    """How processes are started, watched and ended."""

    start: Callable[[Task, bool], StartedProcess] = Child
    """Starts a process, given whether the launcher reads its output."""
    look: Callable[[Sequence[StartedProcess]], EndReason | None] = lambda running: None
    """Checks the running processes for a reason to end them."""
    is_hasty: bool = False
    """After a failure, kill the others without a grace period, because they have nothing to save."""


USUAL = Manner()


class Signals:
    """Records a signal that asks the launcher to end, instead of raising between any two statements."""

    def __init__(self) -> None:
        self.received: int | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal; a second one raises KeyboardInterrupt."""
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number


class Attempt:
    """The processes of one start.

    Args:
        output: the writers of the processes' output; None: they inherit the launcher's stdout and stderr.
        grace: seconds that a process has to end by itself before it is killed.
        signals: the signals that the launcher receives meanwhile.
        deadline: by `time.monotonic`; None: there is none.
    """

    def __init__(
        self, output: Output | None, grace: float, signals: Signals, deadline: float | None, manner: Manner
    ) -> None:
        self._output, self._grace, self._signals = output, grace, signals
        self._deadline, self._manner = deadline, manner
        self._children: list[StartedProcess] = []
        self._reason: EndReason | None = None
        self._killed: tuple[str, ...] = ()
        self._selector = selectors.DefaultSelector()

    def run(self, tasks: Sequence[Task]) -> Outcome:
        """Start the processes and wait until all have ended."""
        with ExitStack() as at_the_end:
            at_the_end.callback(self._selector.close)
            at_the_end.callback(self._kill)
            for task in tasks:
                self._start(task)
            failed, late = self._wait()
            if self._manner.is_hasty and (failed or self._reason) and self._signals.received is None:
                self._grace = 0.0
            self._stop(self._signals.received if self._signals.received == signal.SIGINT else signal.SIGTERM)
        codes = {child.task.name: child.code for child in self._children if child.code is not None}
        if self._reason is not None:
            return Outcome(codes, self._reason.lost, reason=self._reason)
        if failed is None:
            return Outcome(codes, late=late, killed=self._killed)
        last = tuple(self._output[failed.task.name].err.last) if self._output else ()
        return Outcome(codes, failed.task.name, last)

    def _start(self, task: Task) -> None:
        child = self._manner.start(task, self._output is not None)
        self._children.append(child)
        if self._output is not None:
            for pipe, writer in zip(child.pipes, self._output[task.name], strict=True):
                self._selector.register(pipe, selectors.EVENT_READ, writer)

    def _wait(self) -> tuple[StartedProcess | None, tuple[str, ...]]:
        """Wait until there is a reason to stop; return the failed process, and the late ones."""
        while self._signals.received is None:
            ended = [child for child in self._children if child.has_ended()]
            failures = [child for child in ended if child.code]
            if failures:
                # If several failed within one tick, a killed one (code < 0) probably caused the others to fail.
                return min(failures, key=lambda child: (child.code or 0) > 0), ()
            if all(child in ended for child in self._children if not child.task.auxiliary):
                return None, ()
            if self._deadline is not None and time.monotonic() > self._deadline:
                return None, tuple(child.task.name for child in self._children if child not in ended)
            self._reason = self._manner.look([child for child in self._children if child not in ended])
            if self._reason is not None:
                return None, ()
            self._pump()
        return None, ()

    def _stop(self, number: int) -> None:
        """Ask all processes to end, then kill them, and read their last output."""
        patience = time.monotonic() + self._grace
        workers = [child for child in self._children if not child.task.auxiliary]
        for child in workers:
            child.send(number)
        asked = self._signals.received
        self._await(workers, patience, asked)  # before the servers, because workers may still save their variables
        for child in self._children:
            if child.task.auxiliary:
                child.send(signal.SIGTERM)  # a server has nothing to save, and TensorFlow's ignores SIGINT
        self._await(self._children, patience, asked)
        self._killed = tuple(child.task.name for child in self._children if not child.has_ended())
        for child in self._children:
            child.send(signal.SIGKILL)
        while not _have_ended(self._children):
            self._pump()
        patience = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < patience:
            self._pump()

    def _await(self, children: Sequence[StartedProcess], patience: float, asked: int | None) -> None:
        """Wait until the processes have ended, the time is up, or a second signal arrives."""
        while not _have_ended(children) and time.monotonic() < patience and self._signals.received == asked:
            self._pump()

    def _pump(self) -> None:
        """Pass on output, or wait a tick for it."""
        for key, _ in self._selector.select(_TICK_SECONDS):
            data = os.read(key.fd, _READ_BYTES)
            if data:
                key.data.feed(data)
            else:
                key.data.close()
                self._selector.unregister(key.fileobj)

    def _kill(self) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)
        for child in self._children:
            child.close()


def _have_ended(children: Sequence[StartedProcess]) -> bool:
    return all([child.has_ended() for child in children])  # a list, so that each process is checked and reaped


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


TIMED_OUT = 124  # the exit code of timeout(1)
BY_SIGNAL = 128  # as in shells: 130 for Ctrl-C


@dataclass(frozen=True)
class LaunchOptions:
    """How a job is run."""

    title: str = "launch"
    """The name before the launcher's messages."""
    restarts: int = 0
    """The most restarts after failures."""
    timeout: float | None = None
    """Seconds that the job may take, restarts included."""
    grace: float = 5.0
    """Seconds that processes have to end by themselves before they are killed."""
    prefixed: bool = True
    """Prefix lines with the names of their processes; otherwise processes inherit the launcher's stdout and stderr."""
    log_dir: Path | None = None
    """Folder for a copy of each process's output."""
    forms: Callable[[str, str], Form] | None = None
    """Makes the formatter for the lines of a process and stream; None: lines begin with the name of the process."""
    fresh_ports: bool = False
    """Every start takes other ports, so that a start whose port was taken is worth another try."""


@dataclass(frozen=True)
class JobSummary:
    """How a job ended."""

    exit_code: int
    restarts: int
    seconds: float
    outcome: Outcome

    def data(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {
            "exit_code": self.exit_code,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 3),
            "failed": self.outcome.failed,
            "timed_out": bool(self.outcome.late),
            "processes": [_process(name, code) for name, code in self.outcome.codes.items()],
        }


def supervise(tasks: Callable[[int], Sequence[Task]], options: LaunchOptions) -> JobSummary:
    """Run a job to its end.

    Args:
        tasks: makes the processes of a start, given the number of restarts before it.
    """
    began = time.monotonic()
    deadline = None if options.timeout is None else began + options.timeout
    starts = restarts = 0
    may_retry = options.fresh_ports
    with noted_signals() as signals:
        while True:
            outcome = start(tasks(restarts), options, signals, deadline, is_first=starts == 0)
            starts += 1
            if outcome.failed is None or signals.received is not None:
                break
            if may_retry and outcome.port_was_taken:
                may_retry = False
                say(options, f"{outcome.failed} found its port taken: starting again on other ports")
            elif restarts < options.restarts:
                restarts += 1
                say(options, f"{outcome.problem}: restart {restarts} of {options.restarts}")
            else:
                break
    explain(outcome, options, signals.received)
    return JobSummary(exit_code(outcome, signals.received), restarts, time.monotonic() - began, outcome)


@contextmanager
def noted_signals() -> Iterator[Signals]:
    """Record signals instead of ending by them; ignored signals (nohup) stay ignored."""
    signals = Signals()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    caught = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in caught:
            signal.signal(number, signals.note)
        yield signals
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


def start(
    tasks: Sequence[Task],
    options: LaunchOptions,
    signals: Signals,
    deadline: float | None,
    *,
    is_first: bool,
    manner: Manner = USUAL,
) -> Outcome:
    """Start the processes of a job once, and wait until all have ended; only the first start truncates the logs."""
    names = [task.name for task in tasks]
    files = opened(names, options.log_dir, append=not is_first, forms=options.forms)
    with files if options.prefixed else nullcontext() as output:
        return Attempt(output, options.grace, signals, deadline, manner).run(tasks)


def explain(outcome: Outcome, options: LaunchOptions, received: int | None) -> None:
    """Print why the job did not end well; the failed process's last lines come last, where they are seen."""
    if received is not None:
        killed = f"; killed, as they had not ended by then: {', '.join(outcome.killed)}" if outcome.killed else ""
        say(options, f"stopped by {signal_name(received)}{killed}")
    elif outcome.late:
        say(options, f"not done after {options.timeout:g} s; still running: {', '.join(outcome.late)}")
    elif outcome.failed is not None:
        ending = "; the end of its stderr:" if outcome.last_lines else ""
        said = [line for line in outcome.last_lines if line.strip()] or ["(nothing)"] * bool(ending)
        say(options, outcome.problem + ending, *(f"    {line}" for line in said))


def say(options: LaunchOptions, *lines: str) -> None:
    """Print lines as the launcher."""
    print(f"[{options.title}]", "\n".join(lines), file=sys.stderr, flush=True)


def exit_code(outcome: Outcome, received: int | None) -> int:
    """Return the launcher's exit code, given the end of the last start and the signal that it received."""
    if received is not None:
        return BY_SIGNAL + received
    if outcome.late:
        return TIMED_OUT
    return 0 if outcome.failed is None else max(outcome.codes[outcome.failed], 1)


def _process(name: str, code: int) -> dict[str, Any]:
    was_killed = code < 0
    signalled = signal_name(-code) if was_killed else None
    return {"name": name, "exit_code": None if was_killed else code, "signal": signalled}
