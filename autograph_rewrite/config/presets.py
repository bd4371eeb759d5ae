"""Find configurations that are installed with the package, accepted by name wherever a file is.

fsdp        configs/fsdp.yaml        ->  the installed file, unless there is one of that name here
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_PACKAGE = "autograph_rewrite.configs"
_FOLDER = "configs"
_SUFFIX = ".yaml"


def found(path: str | os.PathLike[str]) -> str:
    """The file that `path` names: an existing one, else the shipped one of that name, else `path` itself."""
    shown = os.fspath(path)
    if os.path.exists(shown):
        return shown
    parts = Path(shown).parts
    if parts[:1] == (_FOLDER,) and len(parts) == 2:
        parts = parts[1:]
    name = parts[0].removesuffix(_SUFFIX) if len(parts) == 1 else ""
    folder = _folder()
    return str(folder / f"{name}{_SUFFIX}") if folder is not None and name in names() else shown


def names() -> tuple[str, ...]:
    """The names of all shipped configurations."""
    folder = _folder()
    return tuple(sorted(path.stem for path in folder.glob(f"*{_SUFFIX}"))) if folder is not None else ()


def _folder() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None
