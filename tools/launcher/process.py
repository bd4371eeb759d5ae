"""One process of a job: it cannot outlive the launcher, and leaves no children behind.

It leads a session and a process group of its own: a signal to the group reaches whatever it started, and Ctrl-C in the
terminal reaches the launcher alone, who decides. On Linux the kernel kills it when the launcher dies, however that
happens.
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
    """Variables that it has beside those of the launcher."""
    auxiliary: bool = False
    """It serves the others, and is ended when they have ended."""
    core: int | None = None
    """The only core that it may use."""


class StartedProcess(ABC):
    """A process that was started, and leads a group of its own.

    Args:
        pipes: whether the launcher reads what it writes; otherwise it writes where the launcher does.

    Attributes:
        code: the exit code, once it was seen to have ended; negative: the signal that killed it.
        pipes: the descriptors of its stdout and stderr.
        pid: its number, and that of its group.
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
        """Start it, with these as its stdout and stderr; return its number."""

    @abstractmethod
    def _wait(self) -> int:
        """Wait until it has ended; return its exit code."""

    def has_ended(self) -> bool:
        """Whether it has ended; what it left behind in its group is killed then."""
        if self.code is not None:
            return True
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.send(signal.SIGKILL)  # before it is reaped: until then nobody else can get the number of its group
        self.code = self._wait()
        return True

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        with suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def send(self, number: int) -> None:
        """Send a signal to it and to whatever it started."""
        if self.code is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # it does not lead its group yet; never both: a second Ctrl-C is in a hurry

    def close(self) -> None:
        """Wait until it has ended, and read no more of what it wrote."""
        if self.code is None:
            self.code = self._wait()
        for pipe in self.pipes:
            os.close(pipe)


class Child(StartedProcess):
    """A process that runs another program."""

    def _start(self, outputs: Sequence[int]) -> int:
        out, err = outputs or (None, None)
        # After a fork only the forking thread goes on, so Python code in between is safe where there is one thread
        # only: the launcher has no other.
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
    """Return the C library, for `prepare`; None where it has no use for it."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def prepare(launcher: int, core: int | None, libc: ctypes.CDLL | None) -> None:
    """What a new process does before it becomes the program, in its own stead.

    Args:
        launcher: the process that it ends with.
        core: the only one that it may use; None: all.
        libc: loaded before the fork, as loading takes locks.
    """
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)  # the launcher died before the line above
    if core is not None:
        os.sched_setaffinity(0, {core})
