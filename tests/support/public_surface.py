"""The public surface as lines: Python names with their parameters, verbs with their options, keys of a configuration.

python -m tests.support.public_surface     prints them; tests/golden/public_surface.txt holds those that users have
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.tools import cli


def surface() -> list[str]:
    """Return a line for each parameter, option and key, sorted."""
    schema = Config.model_json_schema()
    return sorted({*_python(), *_verbs(), *_keys(schema, schema["$defs"])})


def _python() -> Iterator[str]:
    for name in ar.__all__:
        value = getattr(ar, name)
        if inspect.isclass(value):
            if issubclass(value, BaseException):
                yield f"ar.{name}: {', '.join(base.__name__ for base in value.__mro__[1:-2])}"
                continue
            for member, what in inspect.getmembers(value):
                if not member.startswith("_"):
                    yield from _callable(f"ar.{name}.{member}", what)
        else:
            yield from _callable(f"ar.{name}", value)


def _callable(name: str, value: Any) -> Iterator[str]:
    yield name
    if not callable(value):
        return
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name != "self" and not parameter.name.startswith("_"):
            needed = " (needed)" if parameter.default is parameter.empty and parameter.kind < 2 else ""
            yield f"{name}({parameter.name}){needed}"


def _verbs() -> Iterator[str]:
    for verb in cli.VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(cli.module_of(verb)).add_arguments(parser)
        for action in parser._actions:
            for option in action.option_strings or [action.dest]:
                yield f"autograph-rewrite {verb} {option}"


def _keys(
    section: Mapping[str, Any], sections: Mapping[str, Any], at: str = "config", seen: tuple[str, ...] = ()
) -> Iterator[str]:
    for key, what in section.get("properties", {}).items():
        yield f"{at}.{key}"
        for name in _references(what):
            if name not in seen:
                yield from _keys(sections[name], sections, f"{at}.{key}", (*seen, name))


def _references(what: Any) -> Iterator[str]:
    if isinstance(what, dict):
        if "$ref" in what:
            yield what["$ref"].rpartition("/")[2]
        for one in what.values():
            yield from _references(one)
    elif isinstance(what, list):
        for one in what:
            yield from _references(one)


if __name__ == "__main__":
    print(*surface(), sep="\n")
