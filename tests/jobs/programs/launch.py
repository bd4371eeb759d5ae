"""The launcher, in a process that the nursery forks: `launch.py OPTIONS SCRIPT ...`."""

from __future__ import annotations

import sys

from autograph_rewrite.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
