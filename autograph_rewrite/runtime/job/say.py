"""What a process of a job says on standard error, at once, with the package's name before it."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Say something to whoever looks at the process."""
    print(f"autograph_rewrite: {text}", file=sys.stderr, flush=True)
