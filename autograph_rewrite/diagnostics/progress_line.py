"""Show the stage of long work and its time so far, on standard error.

    ⠹ 12 s  insert-reshards (41,203 nodes)      on a terminal, after one second; removed when a result is printed
    ... 10 s: insert-reshards (41,203 nodes)    elsewhere, a line after ten seconds and whenever the time has doubled

The work logs its stages to a logger of Python (`stage`), which any program may handle.
AUTOGRAPH_REWRITE_QUIET=1 in the environment turns this display off.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST_SHOWN, FIRST_LINE, EVERY = 1.0, 10.0, 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


class ProgressLine(logging.Handler):
    """Shows the last stage that was logged, until it is cleared."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.DEBUG)
        self._stream = stream
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stage = ""
        self._began = time.monotonic()
        self._next_line = FIRST_LINE
        self._frame = 0
        self._is_shown = False
        self._ended = threading.Event()
        self._drawing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Record the stage that begins."""
        self._stage = record.getMessage()

    def clear(self) -> None:
        """Remove the line, before other text is written; the next stage shows it again."""
        with self._drawing:
            self._stage = ""
            if self._is_shown:
                self._write(_CLEAR)
                self._is_shown = False

    def end(self) -> None:
        """Stop showing stages."""
        self._ended.set()
        self._thread.join()
        self.clear()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            with self._drawing:
                self._show(time.monotonic() - self._began)

    def _show(self, seconds: float) -> None:
        if not self._stage or seconds < FIRST_SHOWN:
            return
        if self._live:
            self._frame += 1
            text = f"{_FRAMES[self._frame % len(_FRAMES)]} {seconds:.0f} s  {printable(self._stage)}"
            self._write(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")
            self._is_shown = True
        elif seconds >= self._next_line:
            self._next_line = 2 * seconds
            self._write(f"... {seconds:.0f} s: {printable(self._stage)}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the stream is closed
            self._ended.set()


def printable(text: str) -> str:
    """Return a text without newlines and terminal control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@contextmanager
def progress_on(stream: TextIO | None, *, lines: bool = True) -> Iterator[ProgressLine | None]:
    """Show progress on a stream during a block, unless the program handles the logger itself.

    Args:
        stream: None, as `sys.stderr` is where it is closed, shows nothing.
        lines: print lines if the stream is no terminal.
    """
    logger = logging.getLogger(LOGGER)
    is_heard = logger.isEnabledFor(logging.DEBUG) or bool(os.environ.get("AUTOGRAPH_REWRITE_QUIET"))
    if stream is None or is_heard or not (lines or stream.isatty()):
        yield None
        return
    line, level, passes_on = ProgressLine(stream), logger.level, logger.propagate
    logger.addHandler(line)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield line
    finally:
        logger.removeHandler(line)
        logger.setLevel(level)
        logger.propagate = passes_on
        line.end()


# Stages of long work go to a logger of Python; the command line shows the last one, and a program may handle them, too:
#
# logging.getLogger("autograph_rewrite.stages").setLevel(logging.DEBUG)

LOGGER = "autograph_rewrite.stages"
_log = logging.getLogger(LOGGER)


def stage(text: str, *details: object) -> None:
    """Log the stage that begins now.

    Args:
        text: a few words, with `%s` for details.
    """
    _log.debug(text, *details)
