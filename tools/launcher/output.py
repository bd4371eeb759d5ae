r"""Multiplex the output of many processes on one terminal: complete lines, each with the name of its process.

worker 0 writes  b"step 1\nst"  b"ep 2\n"        [worker 0] step 1
ps 0 writes      b"serving\n"              ->     [ps 0] serving
                                                  [worker 0] step 2
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from autograph_rewrite.tools.output_pipes import NOISE, drop_the_rest

# Enough for a traceback; the full output is on the terminal or in the log.
KEPT_LINES = 30
# An unfinished line that is longer than this is passed on in pieces.
LONGEST_LINE = 1 << 16

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


Form = Callable[[bytes], bytes]
"""Formats a line, without its newline, for output."""


class LineWriter:
    """Passes on the output of one process line by line; keeps the last lines, and writes a raw copy to a log.

    Args:
        form: formats each line.
        log: receives the raw bytes.
    """

    def __init__(self, out: BinaryIO, form: Form, log: BinaryIO | None = None) -> None:
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self._out = out
        self._form = form
        self._log = log
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take a part of the process's output."""
        if self._log is not None:
            self._log.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)

    def close(self) -> None:
        """Pass on an unfinished last line."""
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        try:
            for line in lines:
                # A progress bar overwrites itself: a terminal would show the part after the last return.
                shown = line.rstrip(b"\r").rpartition(b"\r")[2]
                self.last.append(shown.decode("utf-8", errors="replace"))  # also noise, which may explain a failure
                if NOISE.match(shown):
                    continue
                self._out.write(self._form(shown) + b"\n")
            self._out.flush()
        except BrokenPipeError:  # `launch ... | head` ends the output, not the job
            drop_the_rest(self._out)


class Streams(NamedTuple):
    """The writers for the stdout and the stderr of one process."""

    out: LineWriter
    err: LineWriter


Output = Mapping[str, Streams]


@contextmanager
def opened(
    names: Sequence[str],
    log_dir: Path | None = None,
    *,
    append: bool = False,
    forms: Callable[[str, str], Form] | None = None,
) -> Iterator[Output]:
    """Yield the writers of all processes: stdout to stdout, stderr to stderr, and both to a log per process.

    Args:
        log_dir: the folder of the logs, if any; `worker 0` writes to `worker-0.log`.
        append: keep the present content of the logs.
        forms: makes the formatter for the lines of a process on "stdout" or "stderr"; None: they begin with its name.
    """
    made = forms or prefixed(names)
    with ExitStack() as files:
        output = {}
        for name in names:
            log = None
            if log_dir is not None:
                log_dir.mkdir(parents=True, exist_ok=True)
                path = log_dir / f"{name.replace(' ', '-')}.log"
                log = files.enter_context(open(path, "ab" if append else "wb", buffering=0))
                log.write(b"--- started again ---\n" if append else b"")
            output[name] = Streams(
                LineWriter(_binary(sys.stdout), made(name, "stdout"), log),
                LineWriter(_binary(sys.stderr), made(name, "stderr"), log),
            )
        yield output


def prefixed(names: Sequence[str]) -> Callable[[str, str], Form]:
    """Return a function that makes formatters which prefix lines with the names of their processes."""
    prefix = {"stdout": prefixes(names, sys.stdout), "stderr": prefixes(names, sys.stderr)}
    return lambda name, stream: lambda line: prefix[stream][name] + line


def prefixes(names: Sequence[str], stream: TextIO) -> dict[str, bytes]:
    """Return the prefix of the lines of each process, coloured if the stream is a terminal with colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)  # it handles terminals, NO_COLOR and FORCE_COLOR
    made = {}
    for i, name in enumerate(names):
        with console.capture() as captured:
            console.print(Text(f"[{name}]", style=COLOURS[i % len(COLOURS)]), end=" ", soft_wrap=True)
        made[name] = captured.get().encode()
    return made


def _binary(stream: TextIO) -> BinaryIO:
    """Return the byte stream of a text stream, after flushing the text."""
    stream.flush()
    return stream.buffer
