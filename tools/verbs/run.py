"""`run SCRIPT --config C`: run a user's script with a configuration that the script does not name.

`ar.distribute(step)` and `ar.rewrite(item)` without a configuration take the file that the environment variable
AUTOGRAPH_REWRITE_CONFIG names, so that one script can train under any configuration without changes.

With `--restart N` the script runs in a separate process, which is started again if it fails.
"""

from __future__ import annotations

import argparse
import json

from autograph_rewrite.runtime.job.signals import GRACE, grace
from autograph_rewrite.tools.launcher.job import LaunchOptions, supervise
from autograph_rewrite.tools.launcher.process import Task
from autograph_rewrite.tools.launcher.run_script import execute
from autograph_rewrite.tools.launcher.script import (
    add_script,
    chosen,
    command,
    described,
    environment,
    in_environment,
    require_script,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script as `python SCRIPT ...` would; exit with its code, or 1 when it raises."""
    require_script(args)  # find mistakes before the script has done anything
    if args.restart:
        return run_supervised(args)
    with in_environment({**chosen(args), GRACE: str(grace())}):
        code = execute(args.script, args.args, module=args.module)
    if args.json:
        print(json.dumps({**described(args), "exit_code": code}))
    return code


def run_supervised(args: argparse.Namespace) -> int:
    """Run the script in another process, with up to `args.restart` restarts after failures; return its exit code."""

    def tasks(restarts: int) -> list[Task]:
        return [Task("the script", command(args), environment(args, restarts, seconds))]

    seconds = grace()
    summary = supervise(tasks, LaunchOptions("run", restarts=args.restart, grace=seconds, prefixed=False))
    if args.json:
        print(json.dumps({**described(args), **summary.data()}))
    return summary.exit_code
