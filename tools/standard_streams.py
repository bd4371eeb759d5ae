"""Read graphs from standard input and write results to standard output (`-`).

autograph-rewrite rewrite GRAPH --config fsdp -o - | autograph-rewrite comm -
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from autograph_rewrite.diagnostics.limits import VARIABLE, limit
from autograph_rewrite.errors import ConfigError, GraphError

STANDARD = "-"
INPUT = "standard-input"


@contextmanager
def readable(path: str) -> Iterator[Path]:
    """Yield the path of a graph's file; for standard input, of a temporary copy with the right suffix.

    Raises:
        GraphError: standard input is empty or too large.
    """
    if path != STANDARD:
        yield Path(path)
        return
    from autograph_rewrite.load.files import suffix_of

    most = limit("bytes")
    data = sys.stdin.buffer.read(most + 1)
    if not data:
        raise GraphError("nothing came", where="standard input", hint="send a graph: dump --full G | ... -")
    if len(data) > most:
        raise GraphError(f"more than {most:,} bytes came ({VARIABLE}: bytes)", where="standard input")
    with tempfile.TemporaryDirectory(prefix="autograph-rewrite-") as folder:
        file = Path(folder) / f"{INPUT}{suffix_of(data)}"
        file.write_bytes(data)
        try:
            yield file
        except GraphError as error:
            error.change_where((error.where or "").replace(str(file), "standard input") or None)
            raise


@contextmanager
def to_standard_output(suffix: str) -> Iterator[Path]:
    """Yield a temporary path, whose content is written to standard output if the block ends without an error.

    Raises:
        GraphError: an archive would be written to a terminal.
    """
    if suffix == ".ar" and sys.stdout.isatty():
        raise GraphError("an archive is nothing for a terminal", hint="send it on: ... -o - | autograph-rewrite dump -")
    with tempfile.TemporaryDirectory(prefix="autograph-rewrite-") as folder:
        file = Path(folder) / f"standard-output{suffix}"
        yield file
        sys.stdout.flush()
        with file.open("rb") as content:
            shutil.copyfileobj(content, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def aside(args: argparse.Namespace) -> TextIO:
    """Return the stream for messages of a verb: standard error if its result is written to standard output."""
    return sys.stderr if args.json or args.out == STANDARD else sys.stdout


def require_one_result(args: argparse.Namespace) -> None:
    """Refuse `--json` together with `-o -`.

    Raises:
        ConfigError: both are given.
    """
    if args.json and args.out == STANDARD:
        raise ConfigError("--json and -o - both take standard output", hint="write one of them to a file")
