"""Progress of a long search, on a terminal: one line that is written over, and gone in the end.

autograph_rewrite: Auto has simulated 34 plans (12 s): AllReduce (shared), mesh 1 x 2
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

AFTER_SECONDS = 2.0
"""What is over sooner says nothing."""
WIDTH = 110


@dataclass
class Progress:
    """Tells how far a search is; it decides nothing.

    Attributes:
        began: when, on the clock of `time.monotonic`.
        said: whether there is a line now.
    """

    began: float = field(default_factory=time.monotonic)
    said: bool = False

    def __call__(self, plans: int, last: str) -> None:
        """Tell how many plans there were.

        Args:
            plans: that have been simulated.
            last: what the last one was.
        """
        seconds = time.monotonic() - self.began
        if seconds < AFTER_SECONDS or not sys.stderr.isatty() or os.environ.get("AUTOGRAPH_REWRITE_QUIET"):
            return
        text = f"autograph_rewrite: Auto has simulated {plans} plans ({seconds:.0f} s): {last}"
        print(f"\r{text[:WIDTH]:<{WIDTH}}", end="", file=sys.stderr, flush=True)
        self.said = True

    def done(self) -> None:
        """Remove the line."""
        if self.said:
            print(f"\r{'':<{WIDTH}}\r", end="", file=sys.stderr, flush=True)
            self.said = False
