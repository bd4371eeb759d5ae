"""Warnings that name the line of the user's program, however deep in the package they are given."""

from __future__ import annotations

import sys
import warnings

PACKAGE = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Warn at the innermost line that is not the package's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{PACKAGE}: {message}", stacklevel=level)


def _is_own(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")
