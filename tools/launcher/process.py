"""Run one process of a job, which cannot outlive the launcher and leaves no child processes.

It leads a new session and process group: a signal to the group reaches its children, too, and Ctrl-C in the terminal
reaches only the launcher. On Linux the kernel kills the process when the launcher dies, whatever the cause.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """A process to be started."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has in addition to those of the launcher."""
    auxiliary: bool = False
    """It is a server of the other processes, and is ended after they have ended."""
    core: int | None = None
    """The only core that it may use; None: all."""


class StartedProcess(ABC):
    """A started process, which leads a new process group.

    Args:
        pipes: the launcher reads its output; otherwise it inherits the launcher's stdout and stderr.

    Attributes:
        code: the exit code, once `has_ended` has seen its end; negative: the signal that killed it.
        pipes: the descriptors of its stdout and stderr.
        pid: its process id, which is also that of its group.
    """

    def __init__(self, task: Task, pipes: bool) -> None:
        self.task = task
        self.code: int | None = None
        made = [os.pipe(), os.pipe()] if pipes else []
        self.pipes = [read for read, _ in made]
        self.pid = self._start([write for _, write in made])
        for _, write in made:
            os.close(write)

    @abstractmethod
    def _start(self, outputs: Sequence[int]) -> int:
        """Start it with these descriptors as stdout and stderr; return its process id."""

    @abstractmethod
    def _wait(self) -> int:
        """Wait for its end; return its exit code."""

    def has_ended(self) -> bool:
        """Return whether it has ended; then kill the rest of its group."""
        if self.code is not None:
            return True
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.send(signal.SIGKILL)  # before it is reaped, because until then no other group can get its number
        self.code = self._wait()
        return True

    def is_stopped(self) -> bool:
        """Return whether it is stopped (by SIGSTOP or a debugger)."""
        with suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def send(self, number: int) -> None:
        """Send a signal to it and its children."""
        if self.code is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # it does not lead its group yet; not both, because a second Ctrl-C kills

    def close(self) -> None:
        """Wait for its end, and close its pipes."""
        if self.code is None:
            self.code = self._wait()
        for pipe in self.pipes:
            os.close(pipe)


class Child(StartedProcess):
    """A process that runs another program."""

    def _start(self, outputs: Sequence[int]) -> int:
        out, err = outputs or (None, None)
        # Only the forking thread survives in the child, so Python code before the exec (`preexec_fn`) is safe only in a
        # process with one thread, as the launcher is.
        self._process = subprocess.Popen(
            self.task.command,
            env={**os.environ, **self.task.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=functools.partial(prepare, os.getpid(), self.task.core, libc()),
        )
        return self._process.pid

    def _wait(self) -> int:
        return self._process.wait()


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return the C library for `prepare`; None on other systems than Linux."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def prepare(launcher: int, core: int | None, libc: ctypes.CDLL | None) -> None:
    """Prepare a new process before it runs the program; called in that process.

    Args:
        launcher: the process id of the launcher, with which it ends.
        core: the only core that it may use; None: all.
        libc: loaded before the fork, because loading takes locks.
    """
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)  # the launcher died before the line above
    if core is not None:
        os.sched_setaffinity(0, {core})
