"""The corpus in child processes, one at a time: what hangs or dies is recorded, and the rest goes on.

Lines are appended to a file as they come; what stands there already is not run again.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.corpus import worker
from tests.corpus.program import Library

LIMIT_SECONDS = 240.0
START_SECONDS = 200.0
MEMORY_KB = 4_000_000
Line = dict[str, Any]
Pair = tuple[str, str]


class Process:
    """One worker, for the programs of one library."""

    def __init__(self, library: Library) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        given = (other, dict(library.environment), library.needs)
        self._process = context.Process(target=worker.serve, args=given, daemon=True)
        self._process.start()
        other.close()
        self.is_full = False
        if not self._pipe.poll(START_SECONDS):
            raise RuntimeError("a worker did not start")
        self.missing: str = self._pipe.recv()

    def run(self, name: str, configuration: str) -> Line:
        """Return the line of a program on a configuration; the process is gone afterwards if it hung or died."""
        if self.missing:
            return {"outcome": "not installed", "reason": self.missing}
        try:
            self._pipe.send((name, configuration))
            if not self._pipe.poll(LIMIT_SECONDS):
                self.end()
                return {"outcome": "hang", "reason": f"no end after {LIMIT_SECONDS:.0f} s"}
            line, memory = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.end()
            return {"outcome": "foreign", "reason": f"the process died: exit code {code}"}
        self.is_full = memory > MEMORY_KB
        found: Line = line
        return found

    def end(self) -> None:
        """Kill the process."""
        self.is_full = True
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run_many(
    libraries: Iterable[tuple[Library, list[Pair]]], out: Path, say: Callable[[str], Any] = print
) -> list[Line]:
    """Run pairs of program and configuration that `out` does not have yet; return all lines in it."""
    known = {(line["program"], line["configuration"]) for line in read(out)}
    for library, pairs in libraries:
        process: Process | None = None
        for name, configuration in pairs:
            if (name, configuration) in known:
                continue
            process = process or Process(library)
            line = process.run(name, configuration)
            line = {"program": name, "configuration": configuration, "library": library.name, **line}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            say(sentence(line))
            if process.is_full:
                process.end()
                process = None
        if process is not None:
            process.end()
    return read(out)


def sentence(line: Line) -> str:
    """Return a line for people."""
    text = f"{line['program']:28} {line['configuration']:14} {line['outcome']:9} {line.get('seconds', 0):6.1f} s"
    if line["outcome"] == "exact":
        return f"{text}  error {line.get('error', 0):.0e}  coverage {line['coverage']}"
    return f"{text}  {line.get('reason', '')[:160]}"


def read(path: Path) -> list[Line]:
    """Return the lines in a file, the last of each pair; none where there is no file."""
    if not path.exists():
        return []
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text]
    return list({(line["program"], line["configuration"]): line for line in lines}.values())


def forget(path: Path, outcomes: set[str], programs: set[str]) -> None:
    """Take lines with these outcomes out of the file, so that their programs run again."""
    lines = read(path)
    kept = [line for line in lines if line["outcome"] not in outcomes or line["program"] not in programs]
    if len(kept) < len(lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
