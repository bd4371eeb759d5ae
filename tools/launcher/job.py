"""Run the processes of a job as one: the first failure ends all, and the job is restarted.

start ──► wait ──► every worker ended with 0 ─────────────────────► end the servers: success
           │
           ├────► one failed ──► end the others ──► restarts left? ──► start
           │                                             └─► no: its exit code
           └────► Ctrl-C, SIGTERM, timeout ──► end all: 130, 143, 124
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autograph_rewrite.tools.launcher.attempt import USUAL, Attempt, Manner, Outcome, Signals, signal_name
from autograph_rewrite.tools.launcher.output import Form, opened
from autograph_rewrite.tools.launcher.process import Task

TIMED_OUT = 124  # as timeout(1) has it
BY_SIGNAL = 128  # as shells have it: 130 for Ctrl-C


@dataclass(frozen=True)
class Options:
    """How a job is run."""

    title: str = "launch"
    """Who speaks, in the launcher's own messages."""
    restarts: int = 0
    """How often it is started anew after a failure."""
    timeout: float | None = None
    """How many seconds it may take, restarts included."""
    grace: float = 5.0
    """How many seconds processes have to end by themselves before they are killed."""
    prefixed: bool = True
    """Whether lines begin with the names of their processes; otherwise these write where the launcher does."""
    log_dir: Path | None = None
    """Where the output of each process is kept, too."""
    forms: Callable[[str, str], Form] | None = None
    """Makes the form of the lines that a process writes to a stream; None: they begin with its name."""
    fresh_ports: bool = False
    """Whether every start has ports of its own: then one that somebody else took is worth another try."""


@dataclass(frozen=True)
class Summary:
    """How a job ended."""

    exit_code: int
    restarts: int
    seconds: float
    outcome: Outcome

    def data(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "exit_code": self.exit_code,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 3),
            "failed": self.outcome.failed,
            "timed_out": bool(self.outcome.late),
            "processes": [_process(name, code) for name, code in self.outcome.codes.items()],
        }


def supervise(tasks: Callable[[int], Sequence[Task]], options: Options) -> Summary:
    """Run a job to its end.

    Args:
        tasks: makes the processes of a start, given how many restarts there were before.
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
    return Summary(exit_code(outcome, signals.received), restarts, time.monotonic() - began, outcome)


@contextmanager
def noted_signals() -> Iterator[Signals]:
    """Note signals instead of dying of them; those that are ignored (nohup) stay ignored."""
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
    options: Options,
    signals: Signals,
    deadline: float | None,
    *,
    is_first: bool,
    manner: Manner = USUAL,
) -> Outcome:
    """Start the processes of a job once, and stay until all have ended.

    Args:
        options: how to run them.
        signals: what the launcher is asked for meanwhile.
        deadline: when time is up, by `time.monotonic`.
        is_first: whether logs begin with it.
        manner: how they are started, watched and ended.
    """
    if not options.prefixed:
        return Attempt(None, options.grace, signals, deadline, manner).run(tasks)
    with opened([task.name for task in tasks], options.log_dir, append=not is_first, forms=options.forms) as output:
        return Attempt(output, options.grace, signals, deadline, manner).run(tasks)


def explain(outcome: Outcome, options: Options, received: int | None) -> None:
    """Say why the job did not end well; what the failed process said last stands at the end, where it is seen.

    Args:
        outcome: of its last start.
        options: how it was run.
        received: the signal that ended it.
    """
    if received is not None:
        killed = f"; killed, as they had not ended by then: {', '.join(outcome.killed)}" if outcome.killed else ""
        say(options, f"stopped by {signal_name(received)}{killed}")
    elif outcome.late:
        say(options, f"not done after {options.timeout:g} s; still running: {', '.join(outcome.late)}")
    elif outcome.failed is not None:
        ending = "; the end of its stderr:" if outcome.last_lines else ""
        say(options, outcome.problem + ending, *(f"    {line}" for line in outcome.last_lines))


def say(options: Options, *lines: str) -> None:
    """Speak as the launcher."""
    print(f"[{options.title}]", "\n".join(lines), file=sys.stderr, flush=True)


def exit_code(outcome: Outcome, received: int | None) -> int:
    """Return the launcher's exit code.

    Args:
        outcome: of the last start.
        received: the signal that ended it.
    """
    if received is not None:
        return BY_SIGNAL + received
    if outcome.late:
        return TIMED_OUT
    return 0 if outcome.failed is None else max(outcome.codes[outcome.failed], 1)


def _process(name: str, code: int) -> dict[str, Any]:
    if code < 0:
        return {"name": name, "exit_code": None, "signal": signal_name(-code)}
    return {"name": name, "exit_code": code, "signal": None}
