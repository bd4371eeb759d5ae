"""`run SCRIPT --config C`: run a user's script with a configuration in place of the one that it does not name.

`ar.distribute(step)` and `ar.rewrite(item)` without a configuration take the file that the environment variable
AUTOGRAPH_REWRITE_CONFIG names, so one script trains under any configuration, unchanged.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path

from autograph_rewrite.errors import ConfigError, RewriteError
from autograph_rewrite.plan.config import Config
from autograph_rewrite.tools.common import print_json

CONFIG_VARIABLE = "AUTOGRAPH_REWRITE_CONFIG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", metavar="CONFIG", required=True, help="a YAML configuration; give it before SCRIPT")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script as `python SCRIPT ...` would; exit with its code, or 1 when it raises."""
    script = Path(args.script)
    if not script.is_file():
        raise ConfigError(f"there is no script '{script}'", hint="give the path of a Python file")
    Config.load(args.config)  # a mistake in it should stop us before the script has done anything
    code = _execute(script, args.args, os.path.abspath(args.config))
    if args.json:
        print_json({"script": str(script), "config": args.config, "exit_code": code})
    return code


def _execute(script: Path, arguments: list[str], config: str) -> int:
    before = sys.argv, sys.path[:], os.environ.get(CONFIG_VARIABLE)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    os.environ[CONFIG_VARIABLE] = config
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return _exit_code(end)
    except RewriteError:
        raise
    except Exception as error:
        _print_traceback(error)
        return 1
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is None:
            del os.environ[CONFIG_VARIABLE]
        else:
            os.environ[CONFIG_VARIABLE] = before[2]
    return 0


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
