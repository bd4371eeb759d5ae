"""Crews of processes that take turns: one crew does a round of steps while the others wait to be told.

    parent  ── 5 ──► worker 0 of ours, worker 1 of ours        ◄── seconds per step, of each
            ── 5 ──► worker 0 of theirs, worker 1 of theirs    ◄── ...

Starting TensorFlow takes seconds, and what disturbs the machine lasts for seconds: contestants that are jobs of several
processes can be compared within a round only if all are there from the beginning.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from benchmarks.child import ROOT, ChildFailed, environment_of

Step = Callable[[], object]


class Crew:
    """The processes of one contestant.

    Args:
        function: `module:function` of what makes the step; it is given `worker` and the arguments.
        arguments: of each worker, as far as JSON can tell them.
        environments: more variables for each worker.
        prefixes: what starts each worker, as `ip netns exec NAME`; nothing by default.
        timeout: seconds for the start and for each round.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Mapping[str, Any]],
        environments: Sequence[Mapping[str, str]],
        prefixes: Sequence[Sequence[str]] = (),
        timeout: float = 240,
    ) -> None:
        self._function = function
        self._members: list[tuple[subprocess.Popen[bytes], IO[str], IO[bytes]]] = []
        before = prefixes or [[]] * len(arguments)
        for given, more, prefix in zip(arguments, environments, before, strict=True):
            self._members.append(_start(function, given, environment_of(more), prefix, timeout))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process, channel, _ in self._members:
            channel.close()
            process.kill()
        for process, _, _ in self._members:
            process.wait()

    def ready(self) -> list[Any]:
        """Wait until every member has made its step and done it once; return the seconds that this took each."""
        return self._answers()

    def round(self, calls: int) -> list[Any]:
        """Let all members do so many steps at the same time; return the seconds per step of each."""
        for _, channel, _ in self._members:
            channel.write(f"{calls}\n")
            channel.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        found = []
        for process, channel, errors in self._members:
            try:
                line = channel.readline()
            except OSError:
                line = ""
            if not line:
                process.kill()
                errors.seek(0)
                tail = "\n".join(errors.read().decode(errors="replace").strip().splitlines()[-12:])
                raise ChildFailed(f"a process of {self._function} did not answer\n{tail}")
            found.append(json.loads(line))
        return found


def _start(
    function: str, arguments: Mapping[str, Any], environment: Mapping[str, str], prefix: Sequence[str], timeout: float
) -> tuple[subprocess.Popen[bytes], IO[str], IO[bytes]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout)
    errors = tempfile.TemporaryFile()  # noqa: SIM115  is open as long as the process runs
    number = str(theirs.fileno())
    command = [*prefix, sys.executable, "-m", "benchmarks.turns", number, function, json.dumps(arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, stderr=errors
    )
    theirs.close()
    return process, ours.makefile("rw"), errors


def times(crews: Mapping[str, Crew], *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Time the crews in turn, round by round; who begins changes.

    Args:
        crews: by name; all have started.
        rounds: numbers per crew.
        calls: steps in one round.

    Returns:
        Seconds per step of the slowest member, one number per round.
    """
    names = list(crews)
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        at = index % len(names)
        for name in names[at:] + names[:at]:
            seconds = max(crews[name].round(calls))
            if index:  # the first round warms up
                found[name].append(seconds)
    return found


def _main(number: str, function: str, arguments: str) -> None:
    began = time.perf_counter()
    module, _, name = function.partition(":")
    with socket.socket(fileno=int(number)) as connection, connection.makefile("rw") as channel:
        step: Step = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        step()
        print(time.perf_counter() - began, file=channel, flush=True)
        for line in channel:
            began, calls = time.perf_counter(), int(line)
            for _ in range(calls):
                step()
            print((time.perf_counter() - began) / calls, file=channel, flush=True)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
