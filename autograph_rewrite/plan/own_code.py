"""Python files that a configuration names are run only where the user has allowed it.

A configuration is data, and may be a stranger's. Code that it names (`strategy: {name: file.py:Class}`) runs after
`--allow-code` on the command line, which allows the file that the given configuration names, or `ar.allow_code(path)`.
What is allowed stands in the environment, so that the processes of a job have it from the one that starts them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.builder_names import own_builder
from autograph_rewrite.plan.config import Config

VARIABLE = "AUTOGRAPH_REWRITE_ALLOW_CODE"


def allow_code(path: str | os.PathLike[str]) -> None:
    """Let configurations that name a Python file run it, in this process and those that it starts.

    Args:
        path: of the file.

    Raises:
        ConfigError: there is no such file.
    """
    if not Path(path).is_file():
        raise ConfigError(f"there is no file '{os.fspath(path)}' to allow", hint="name the Python file itself")
    os.environ[VARIABLE] = json.dumps(sorted({*_allowed(), _identity(path)}))


def require_allowed(path: Path, where: str) -> None:
    """Refuse to run a file that nobody has allowed.

    Raises:
        ConfigError: it is not allowed.
    """
    if _identity(path) in _allowed():
        return
    raise ConfigError(
        f"{where}: the configuration wants '{path}' to be run, and code that a file names runs only if you allow it",
        hint=f"read it, then add --allow-code to the command, or ar.allow_code({str(path)!r}) to the program",
    )


def named_file(config: Config) -> Path | None:
    """The Python file that a configuration names; None where it names none.

    Raises:
        ConfigError: there is no such file.
    """
    own = own_builder(config.strategy.name)
    return find_file(own[0], config.where("strategy", "name")) if own is not None else None


def find_file(file: str, where: str) -> Path:
    """The file, which is named from the working directory, or from where the configuration stands.

    Raises:
        ConfigError: there is none.
    """
    places = [Path(file), Path(where.rpartition(":")[0] or where).parent / file]
    for path in places:
        if path.is_file():
            return path
    raise ConfigError(
        f"{where}: there is no file '{file}'", hint="name it from here, or from the configuration's folder"
    )


def _allowed() -> frozenset[str]:
    try:
        listed = json.loads(os.environ.get(VARIABLE) or "[]")
    except ValueError:
        listed = None
    if not isinstance(listed, list):
        raise ConfigError(f"{VARIABLE} is no list of paths in JSON", hint="leave it unset, and use --allow-code")
    return frozenset(str(path) for path in listed)


def _identity(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(path)
