"""Kinds of files: what has no end is not read."""

from __future__ import annotations

import os
import stat


def is_device_or_pipe(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names something without an end, such as a pipe.

    Raises:
        OSError: there is nothing of that name, or it cannot be looked at.
    """
    mode = os.stat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
