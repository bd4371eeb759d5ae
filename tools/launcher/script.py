"""Declare and check the script arguments of `run` and `launch`.

Each process that they start runs `run_script.py`, whose `execute` the verb `run` also calls in its own process. So a
script gets the same arguments, paths, errors and exit codes whether one process runs it or many.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograph_rewrite.config.presets import found
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.runtime.job.signals import GRACE
from autograph_rewrite.tools.launcher import run_script

if TYPE_CHECKING:
    from autograph_rewrite.config.config import Config

CONFIG_VARIABLE = run_script.CONFIG_VARIABLE
RESTART_VARIABLE = "AUTOGRAPH_RESTART"


def add_script(parser: argparse.ArgumentParser) -> None:
    """Declare the script and the options that come before it."""
    add = parser.add_argument
    add("--config", metavar="CONFIG", help="a YAML configuration, or the name of a shipped one")
    add("--allow-code", action="store_true", help="run the Python file that the configuration names")
    add("--restart", metavar="N", type=at_least(0), default=0, help="start again after a failure, at most N times")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    add("script", metavar="SCRIPT", help="a Python file; all options above come before it")
    add("args", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from {least} on")
        return int(text)

    return read


def require_script(args: argparse.Namespace) -> Config | None:
    """Require the script and its configuration before anything is started; return the configuration.

    Raises:
        ConfigError: the script does not exist, or the configuration is wrong.
    """
    if args.module:
        package = args.script.partition(".")[0]
        if not package.isidentifier() or (importlib.util.find_spec(package) is None and not _is_here(package)):
            raise ConfigError(f"there is no module '{args.script}'", hint="leave -m out to run a file")
    elif not Path(args.script).is_file():
        raise ConfigError(f"there is no script '{args.script}'", hint="give the path of a Python file")
    if args.config is None:
        return None
    from autograph_rewrite.tools.common_arguments import (
        read_config,  # importing it takes half of the start-up time of a script without a configuration
    )

    return read_config(args, load_custom_ops=False)  # the processes that train load them


def command(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that runs the script in a separate process."""
    return (sys.executable, run_script.__file__, *(("-m",) if args.module else ()), args.script, *args.args)


def environment(args: argparse.Namespace, restarts: int, grace: float) -> dict[str, str]:
    """Return the environment variables of each process.

    Args:
        restarts: how many there were before.
        grace: seconds that the process has to end by itself.
    """
    # Unbuffered, so that lines appear when they are written.
    given = {RESTART_VARIABLE: str(restarts), "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED") or "1"}
    return {**given, GRACE: str(grace), **chosen(args)}


def chosen(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that name the configuration, if there is one."""
    if args.config is None:
        return {}
    return {CONFIG_VARIABLE: os.path.abspath(found(args.config)), run_script.ANSWERED_VARIABLE: ""}


@contextmanager
def in_environment(given: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process during a block."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


def described(args: argparse.Namespace) -> dict[str, Any]:
    """Return the script and its configuration, for --json."""
    return {"script": args.script, "config": args.config}


def _is_here(package: str) -> bool:
    """Return whether a package is in the current folder, which only the script's process has in its path."""
    return Path(package).is_dir() or Path(f"{package}.py").is_file()
