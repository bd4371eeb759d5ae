"""Print a generated page, or their names: `python -m autograph_rewrite.tools.dev.reference [verbs.md]`."""

from __future__ import annotations

import sys

from autograph_rewrite.tools.dev.reference.pages import pages

if __name__ == "__main__":
    made = pages()
    print("\n".join(made[name] for name in sys.argv[1:]) or "\n".join(made))
