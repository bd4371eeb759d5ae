"""Fork the processes of an elastic job from the launcher, which has imported TensorFlow once for all of them.

    launcher    import tensorflow, keras          seconds, once
      fork ──►  worker 0 of generation 1          milliseconds, and the script begins
      fork ──►  worker 0 of generation 2

Importing does not start TensorFlow: its threads and its server start in the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from autograph_rewrite.cluster.membership import membership_of
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import CheckpointError, ClusterError, RewriteError
from autograph_rewrite.runtime.job import liveness
from autograph_rewrite.runtime.job.job_memory import JobMemory
from autograph_rewrite.runtime.job.liveness import is_of_the_job
from autograph_rewrite.tools.launcher.process import StartedProcess, Task, libc, prepare
from autograph_rewrite.tools.launcher.run_script import FLUSH, INTERRUPTED, PACKAGE, execute

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def import_once() -> None:
    """Import the modules that all workers need."""
    package = importlib.import_module(PACKAGE)
    for module in ("tensorflow", "keras", f"{PACKAGE}.runtime.keras_fit"):
        importlib.import_module(module)
    for name in package.__all__:
        getattr(package, name)


class ForkedChild(StartedProcess):
    """A forked process.

    Args:
        task: its command is a script and the script's arguments.
        body: the function that it runs; returns its exit code.
    """

    def __init__(self, task: Task, body: Callable[[Task], int]) -> None:
        self._body = body
        super().__init__(task, pipes=True)

    def _start(self, outputs: Sequence[int]) -> int:
        prepared = functools.partial(prepare, os.getpid(), self.task.core, libc())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # until the child has reset the launcher's handlers
        pid = os.fork()
        if not pid:
            self._become(prepared, outputs, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    def _become(self, prepared: Callable[[], None], outputs: Sequence[int], mask: set[int | signal.Signals]) -> None:
        """Turn the forked launcher into the process: call `prepared`, restore the signal `mask`; never return."""
        code = 1
        try:
            os.setsid()
            prepared()
            for number in HANDLED:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _leave_sockets()
            os.dup2(outputs[0], 1)
            os.dup2(outputs[1], 2)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            os.environ.update(self.task.environment)
            atexit._clear()
            code = self._body(self.task)
            threading._shutdown()  # type: ignore[attr-defined] # joins threads, as Python does at its end
            atexit._run_exitfuncs()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            time.sleep(FLUSH)  # instead of TensorFlow's clean-up, which takes a second
            os._exit(code)

    def _wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_script(task: Task, heartbeat: float, *, module: bool) -> int:
    """Join the job as a worker, send heartbeats and run the script; return its exit code.

    Args:
        heartbeat: seconds between two heartbeats.
        module: the script is the name of a module.
    """
    memory = JobMemory.here()
    assert memory is not None
    memory.beat(heartbeat)
    script, *arguments = task.command
    try:
        code = execute(script, arguments, module=module)
        error = getattr(sys, "last_value", None)
        if code and isinstance(error, Exception):
            memory.blame(_missed(error))
        return code
    except Exception as error:  # an error of this package, which is reported without a traceback
        from autograph_rewrite.tools.cli import report

        if isinstance(error, ClusterError):
            memory.blame(error.lost)
        if not isinstance(error, ClusterError | CheckpointError) or getattr(error, "differs", False):
            memory.refuse()
        return report(error, as_json=False)


def _missed(error: Exception) -> tuple[int, ...]:
    """Return the workers that do not answer, if they may have caused a script's error.

    A step in a function of the program fails with an error of TensorFlow, which names no worker.
    """
    if not is_of_the_job(error):
        return ()
    with contextlib.suppress(RewriteError):
        member = membership_of(Config())
        if member is not None:
            return liveness.workers_in(liveness.silent(member))
    return ()


def _leave_sockets() -> None:
    """Close the inherited connections of the launcher, because other hosts see its end only when all copies close."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.dup2(0, int(name))  # the number stays in use, because an inherited object may close it later
