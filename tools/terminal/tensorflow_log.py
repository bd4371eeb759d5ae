"""TensorFlow's log lines: information and warnings of its C++ code wait until something goes wrong, and are shown then.

I0000 00:00:1795700000.123456   11621 port.cc:153] oneDNN custom operations are on ...        waits
F0000 ..., E0000 ..., and whatever has another form                                           is shown at once
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOISE = re.compile(
    rb"([IW]\d{4} \d|\d{4}-\d\d-\d\d [\d:.]+: [IW] tensorflow/|WARNING: All log messages before absl|To enable the f)"
)


@contextmanager
def quiet_tensorflow() -> Iterator[Callable[[], None]]:
    """Hold such lines back while the block runs; what it is given shows those of them that have come."""
    if sys.stderr is not sys.__stderr__ or sys.stderr is None:  # somebody looks at standard error already
        yield lambda: None
        return
    sys.stderr.flush()
    kept: list[bytes] = []
    shown, (read, write) = os.dup(2), os.pipe()

    def pass_on() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if NOISE.match(line):
                    kept.append(line)
                else:
                    os.write(shown, line)

    reader = threading.Thread(target=pass_on, daemon=True)
    os.dup2(write, 2)
    os.close(write)
    sys.stderr = os.fdopen(os.dup(shown), "w", buffering=1, errors="backslashreplace")
    reader.start()
    try:
        yield lambda: _write_all(shown, kept)
    finally:
        sys.stderr.flush()
        sys.stderr = sys.__stderr__
        os.dup2(shown, 2)
        reader.join(1)
        os.close(shown)


def _write_all(shown: int, kept: list[bytes]) -> None:
    while kept:
        os.write(shown, kept.pop(0))
