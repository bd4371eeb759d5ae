"""The launcher, in a process that the nursery forks: `launch.py OPTIONS SCRIPT ...`.

It ignores the signals that IGNORED names, as under nohup, and no others, whoever has started the tests.
"""

from __future__ import annotations

import os
import signal
import sys

from autograph_rewrite.tools.cli import main

if __name__ == "__main__":
    for name, handler in (("SIGHUP", signal.SIG_DFL), ("SIGINT", signal.default_int_handler)):
        signal.signal(getattr(signal, name), signal.SIG_IGN if name in os.environ.get("IGNORED", "") else handler)
    sys.exit(main(["launch", *sys.argv[1:]]))
