"""Run the Python files that a configuration names, if that is allowed.

A configuration is data, and may be a stranger's. Code that it names (`strategy: {name: file.py:Class}`, `passes`,
`ops`) runs after `--allow-code` on the command line, which allows the files that the given configuration names, or
`ar.allow_code(path)`. The environment has the list of allowed files, so that the processes of a job inherit it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.strategy_names import own_builder
from autograph_rewrite.errors import ConfigError, RewriteError

VARIABLE = "AUTOGRAPH_REWRITE_ALLOW_CODE"


def allow_code(path: str | os.PathLike[str]) -> None:
    """Let configurations that name a Python file run it, in this process and those that it starts.

    Raises:
        ConfigError: there is no such file.
    """
    if not Path(path).is_file():
        raise ConfigError(f"there is no file '{os.fspath(path)}' to allow", hint="name the Python file itself")
    os.environ[VARIABLE] = json.dumps(sorted({*_allowed(), os.path.realpath(path)}))


def named_files(config: Config) -> list[Path]:
    """The Python files that a configuration names: of its builder, its compressors, its passes and its ops.

    Raises:
        ConfigError: there is no such file.
    """
    strategy = config.strategy
    classes: list[tuple[str | None, tuple[str | int, ...]]] = [
        (strategy.name, ("strategy", "name")),
        (strategy.compressor, ("strategy", "compressor")),
        *((one.compressor, ("variables", i, "compressor")) for i, one in enumerate(config.variables)),
    ]
    named = [(own[0], path) for name, path in classes if name is not None and (own := own_builder(name))]
    named += [(one.file.rpartition(":")[0], ("passes", i, "file")) for i, one in enumerate(config.passes)]
    named += [(one.file, ("ops", i, "file")) for i, one in enumerate(config.ops)]
    return [find_file(file, config.where(*path)) for file, path in named]


def load_module(file: str, where: str) -> tuple[Path, ModuleType]:
    """Run a file that a configuration names as a separate module; return its path and the module.

    Raises:
        ConfigError: it does not exist, may not run, is no Python file, or fails.
    """
    path = find_file(file, where)
    if os.path.realpath(path) not in _allowed():
        raise ConfigError(
            f"{where}: the configuration wants '{path}' to be run, and code that a file names runs only if you "
            "allow it",
            hint=f"read it, then add --allow-code to the command, or ar.allow_code({str(path)!r}) to the program",
        )
    spec = importlib.util.spec_from_file_location(f"autograph_rewrite_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: '{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    with blaming(f"{where}: '{path}' cannot be run", ConfigError):
        spec.loader.exec_module(module)
    return path, module


@contextmanager
def blaming(what: str, kind: type[RewriteError]) -> Iterator[None]:
    """Report an exception of a user's code as the user's mistake, at the line of the user's file.

    Args:
        what: the beginning of the message.

    Raises:
        RewriteError: the code raised one, or any other exception, which becomes one of `kind`.
    """
    try:
        yield
    except RewriteError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}", where=_place(error)) from error


def _place(error: Exception) -> str | None:
    """Return the innermost line in the user's file; lines of modules that it calls are not the place of the mistake."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("autograph_rewrite", "importlib", "contextlib")
    ]
    return next((f"{file}:{line}" for file, line in reversed(lines) if file == lines[0][0]), None)


def find_file(file: str, where: str) -> Path:
    """The path of a file that is named from the working directory, or from the configuration's folder.

    Raises:
        ConfigError: there is no such file.
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
