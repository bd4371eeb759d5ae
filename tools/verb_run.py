"""`run SCRIPT --config C`: run a user's script with a configuration in place of the one that it does not name.

`ar.distribute(step)` and `ar.rewrite(item)` without a configuration take the file that the environment variable
AUTOGRAPH_REWRITE_CONFIG names, so one script trains under any configuration, unchanged.

With `--restart N` the script gets a process of its own, which is started again when it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autograph_rewrite.errors import RewriteError
from autograph_rewrite.tools.launcher import Options, supervise
from autograph_rewrite.tools.launcher_process import Task
from autograph_rewrite.tools.launcher_script import add_script, command, described, environment, require_script

CONFIG_VARIABLE = "AUTOGRAPH_REWRITE_CONFIG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script as `python SCRIPT ...` would; exit with its code, or 1 when it raises."""
    require_script(args)  # a mistake should stop us before the script has done anything
    if args.restart:
        return _run_supervised(args)
    code = _execute(args)
    if args.json:
        print(json.dumps({**described(args), "exit_code": code}))
    return code


def _run_supervised(args: argparse.Namespace) -> int:
    """Run it in another process, again and again."""

    def tasks(restarts: int) -> list[Task]:
        return [Task("the script", command(args), environment(restarts))]

    summary = supervise(tasks, Options("run", restarts=args.restart, prefixed=False))
    if args.json:
        print(json.dumps({**described(args), **summary.data()}))
    return summary.exit_code


def _execute(args: argparse.Namespace) -> int:
    try:
        with _environment_of(args):
            if args.module:
                runpy.run_module(args.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        return _exit_code(end)
    except RewriteError:
        raise
    except Exception as error:
        _print_traceback(error)
        return 1
    return 0


@contextmanager
def _environment_of(args: argparse.Namespace) -> Iterator[None]:
    """Set arguments, path and configuration, as Python would for the script; put them back afterwards."""
    before = sys.argv, sys.path[:], os.environ.get(CONFIG_VARIABLE)
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, os.getcwd() if args.module else str(Path(args.script).resolve().parent))
    if args.config is not None:
        os.environ[CONFIG_VARIABLE] = os.path.abspath(args.config)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            os.environ[CONFIG_VARIABLE] = before[2]
        else:
            os.environ.pop(CONFIG_VARIABLE, None)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _print_traceback(error: Exception) -> None:
    """Print the script's own part of the traceback; how we came to run it is no news to its author."""
    own = error.__traceback__
    while own is not None and "runpy" not in own.tb_frame.f_code.co_filename:
        own = own.tb_next
    while own is not None and "runpy" in own.tb_frame.f_code.co_filename:
        own = own.tb_next
    traceback.print_exception(type(error), error, own or error.__traceback__)
