"""Print the messages of a process of a job: on standard error, at once, after the package's name."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a message."""
    print(f"autograph_rewrite: {text}", file=sys.stderr, flush=True)
