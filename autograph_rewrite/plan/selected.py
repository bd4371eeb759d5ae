"""Find the configuration for a program that passes none, set by `run --config` or `launch --config`.

These name it in the environment. A program that uses it prints so, once; a program that passes another one is warned.
The environment records that either has happened, for `run` to see when the program has ended.
"""

from __future__ import annotations

import os
import sys

from autograph_rewrite.cluster.launchers import CONFIG as VARIABLE
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.plan import Plan

ANSWERED = "AUTOGRAPH_REWRITE_CONFIG_ANSWERED"  # tools/launcher/run_script.py reads it, and has a copy of the name


def chosen(config: ConfigLike | Plan | None) -> Config | Plan:
    """The configuration or plan that a program passes, or else the configuration of the command line.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    if config is None:
        return _of_command_line()
    given = config if isinstance(config, Plan) else Config.of(config)
    _compare(given)
    return given


def chosen_config(config: ConfigLike | None) -> Config:
    """The configuration that a program passes, or else that of the command line, or else the defaults.

    Raises:
        ConfigError: it is wrong.
    """
    if config is not None:
        return Config.of(config)
    return Config.load(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else Config()


def answered() -> None:
    """Remember that the program has used the configuration of the command line, or was warned that it does not."""
    os.environ[ANSWERED] = "1"


def _of_command_line() -> Config:
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(
            "no configuration: none is passed, and none was given on the command line",
            hint="pass a path, a dict or the name of a shipped one, or start the program with "
            "`autograph-rewrite run --config FILE SCRIPT`",
        )
    config = Config.load(path)
    if not os.environ.get(ANSWERED):
        print(f"autograph_rewrite: the configuration is {path}, which --config gave", file=sys.stderr, flush=True)
    answered()
    return config


def _compare(given: Config | Plan) -> None:
    """Warn where the command line gave a configuration that the program does not use."""
    path = os.environ.get(VARIABLE)
    if not path or os.environ.get(ANSWERED):
        return
    answered()
    if isinstance(given, Config) and given == Config.load(path):
        return
    name = given.source.name if isinstance(given, Plan) else given.file
    own = f"'{name}'" if os.path.exists(name) else "one of its own"
    what = "plan" if isinstance(given, Plan) else "configuration"
    warn_user(
        f"the program passes a {what}, {own}, so '{path}', which --config gave, is not used; "
        "leave it out of the call to use that one"
    )
