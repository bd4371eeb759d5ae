"""Starts workers in a fraction of a second: a process that has imported TensorFlow and the package forks for each.

    test ──{"argv": [...], "environ": {...}, "log": "w0.log"}──► nursery ──fork──► worker
         ◄──{"pid": 7}──   ...   ◄──{"pid": 7, "code": -9}──

Importing does not start TensorFlow: its threads and its server begin in the worker, after it has imported the package.
That is how a process joins a job, so a worker imports it as if nobody had before; only its modules are there already.
With SLOW_EXIT in its environment a worker ends as Python does; otherwise without tidying up.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PACKAGE = "autograph_rewrite"
TICK, FLUSH = 0.01, 0.5
PR_SET_PDEATHSIG = 1


class Worker:
    """A process of the nursery."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.code: int | None = None
        self._ended = threading.Event()

    def ended(self, code: int) -> None:
        """Note how it ended (negative: the signal)."""
        self.code = code
        self._ended.set()

    def wait(self, seconds: float) -> int | None:
        """Return how it ended, None if it still runs after so long."""
        self._ended.wait(seconds)
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; one that has ended needs none, though the nursery may not have said so yet."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Nursery:
    """The process that forks; use it as a context manager."""

    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
        )
        self._workers: dict[int, Worker] = {}
        self._starting, self._started = threading.Lock(), threading.Condition()
        self._is_ready = threading.Event()
        self._last: Worker | None = None
        self._log = Path()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it kills whoever is left
        self._process.wait(30)

    def wait(self, seconds: float) -> None:
        """Wait until it has imported TensorFlow, so that this is not part of the first test that needs it."""
        assert self._is_ready.wait(seconds), "the nursery does not start"

    def start(
        self,
        argv: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        *,
        errors: Path | None = None,
        folder: Path = ROOT,
        seconds: float = 60,
    ) -> Worker:
        """Run a Python script in a new process, whose errors may go into a file of their own."""
        assert self._process.stdin is not None
        with self._starting, self._started:
            self._last, self._log = None, log
            paths = {"log": str(log), "errors": str(errors or log), "folder": str(folder)}
            environ = {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", ""), **environ}
            request = {"argv": [str(arg) for arg in argv], "environ": environ, **paths}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            assert self._started.wait_for(lambda: self._last is not None, seconds), "the nursery does not answer"
            assert self._last is not None
            return self._last

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "ready" in said:
                self._is_ready.set()
                continue
            if "code" in said:
                self._workers[said["pid"]].ended(said["code"])
                continue
            with self._started:
                self._last = self._workers[said["pid"]] = Worker(said["pid"], self._log)
                self._started.notify()


def serve() -> None:
    """Fork for every line of stdin, and tell how the children end; kill them when stdin does."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    _load_package()
    _tell(ready=1)
    children: set[int] = set()
    rest = b""
    is_open = True
    while is_open or children:
        if is_open and select.select([0], [], [], TICK)[0]:
            data = os.read(0, 1 << 16)
            is_open = bool(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                children.add(_start(json.loads(line)))
        if not is_open:
            time.sleep(TICK)
        for child in list(children):
            if not is_open:
                os.kill(child, signal.SIGKILL)
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.discard(pid)
                _tell(pid=pid, code=os.waitstatus_to_exitcode(status))


def _load_package() -> None:
    """Import what the public names of the package stand for: a third of what a small worker does otherwise."""
    package = importlib.import_module(PACKAGE)
    for name in package.__all__:
        getattr(package, name)


def _tell(**said: int) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def _start(request: Mapping[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _become(request)
    _tell(pid=pid)
    return pid


def _become(request: Mapping[str, Any]) -> None:
    """Be a process that was started with a command line of its own; never return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, number in (("log", 1), ("errors", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(request["environ"])
    if (renew := getattr(sys, "__renew_block_hits__", None)) is not None:
        renew()  # tests.mutation.blocks records which test runs what
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent.resolve())
    os.chdir(request["folder"])
    del sys.modules[PACKAGE]
    if "SLOW_EXIT" in os.environ:
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        time.sleep(FLUSH)  # as long as Python itself takes to end: others may wait for what gRPC has still to send
        os._exit(code)  # tidying up takes TensorFlow a second


if __name__ == "__main__":
    serve()
