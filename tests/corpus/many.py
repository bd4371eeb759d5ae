"""The corpus in child processes, one at a time: what hangs or dies is recorded, and the rest goes on.

Lines are appended to a file as they come; what stands there already is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.corpus import fit, worker
from tests.corpus.program import Library
from tests.support.supervised import NoAnswerError, Process

LIMIT_SECONDS = (2 + fit.TRIES) * fit.LIMIT_SECONDS + 60.0
"""A job is compared with several runs of one process, each of which has a limit."""
START_SECONDS = 200.0
MEMORY_KB = 4_000_000
Line = dict[str, Any]
Pair = tuple[str, str]


def _started(library: Library) -> Process:
    """Return a worker for the programs of one library; when it is ready it says what is missing."""
    given = dict(library.environment), library.needs
    return Process(worker.serve, *given, start=START_SECONDS, limit=LIMIT_SECONDS, memory=MEMORY_KB)


def _line(process: Process, name: str, configuration: str) -> Line:
    """Return the line of a program on a configuration; the process is gone afterwards if it hung or died."""
    if process.ready:
        return {"outcome": "not installed", "reason": process.ready}
    try:
        return process.ask((name, configuration))
    except NoAnswerError as error:
        return {"outcome": "hang" if error.hung else "foreign", "reason": str(error)}


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
            process = process or _started(library)
            line = _line(process, name, configuration)
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
        return f"{text}  error {line.get('error', 0):.0e}  coverage {line.get('coverage')}"
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
