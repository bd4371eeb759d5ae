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
from collections.abc import Mapping
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


class Child:
    """A process that was started."""

    def __init__(self, task: Task, *, pipes: bool) -> None:
        """Start it.

        Args:
            pipes: whether the launcher reads what it writes; otherwise it writes where the launcher does.
        """
        self.task = task
        output = subprocess.PIPE if pipes else None
        # After a fork only the forking thread goes on, so Python code in between is safe where there is one thread
        # only: the launcher has no other.
        self._process = subprocess.Popen(
            task.command,
            env={**os.environ, **task.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=functools.partial(prepare, os.getpid(), task.core, libc()),
        )

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, once it was seen to have ended; negative: the signal that killed it."""
        return self._process.returncode

    @property
    def pipes(self) -> tuple[int, int]:
        """The descriptors of its stdout and stderr."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout.fileno(), self._process.stderr.fileno()

    def has_ended(self) -> bool:
        """Whether it has ended; what it left behind in its group is killed then."""
        if self.code is not None:
            return True
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.send(signal.SIGKILL)  # before it is reaped: until then nobody else can get the number of its group
        self._process.wait()
        return True

    def send(self, number: int) -> None:
        """Send a signal to it and to whatever it started."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Wait until it has ended, and read no more of what it wrote."""
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


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
