"""Regular expressions of the package: what they are shown may be as long as a file, and is held once."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite
from autograph_rewrite.ir.format.literals import Literals

_parser: Any  # Python has no public one
if sys.version_info >= (3, 11):
    from re import _constants, _parser
else:
    import sre_constants as _constants
    import sre_parse as _parser

MANY = 1_000_000
"""Repeats of a group that take no more memory than there is: 120 MB."""
_SINGLE = (_constants.IN, _constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY)


def remembers(parsed: Any) -> bool:
    """Tell whether a pattern repeats a group so that Python's `re` keeps a place for each repeat: some 100 bytes."""
    for op, argument in parsed:
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            _, most, item = argument
            if most > MANY and not (len(item) == 1 and item[0][0] in _SINGLE):
                return True
        inner = argument if isinstance(argument, tuple) else ()
        groups = [part for one in inner for part in (one if isinstance(one, list) else [one])]
        if any(isinstance(part, _parser.SubPattern) and remembers(part) for part in groups):
            return True
    return False


def compiled() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the patterns that modules have made when they were imported."""
    for found in pkgutil.walk_packages(autograph_rewrite.__path__, "autograph_rewrite."):
        if found.name.rpartition(".")[2] != "__main__":
            for name, value in vars(importlib.import_module(found.name)).items():
                if isinstance(value, re.Pattern):
                    yield f"{found.name}.{name}", value


def written() -> Iterator[tuple[str, str]]:
    """Yield the patterns that are written out where they are used."""
    root = Path(autograph_rewrite.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                given = node.args[0]
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    yield f"{path.relative_to(root)}:{node.lineno}", given.value


def test_no_pattern_remembers_each_repeat_of_a_group() -> None:
    """A text of 64 MiB took 8 GiB so. State a limit, `(?:...){0,100}`; Python 3.10 has no possessive repeats."""
    here = [(name, pattern.pattern) for name, pattern in compiled()]
    assert len(here) > 40
    assert [name for name, pattern in (*here, *written()) if remembers(_parser.parse(pattern))] == []


@pytest.mark.parametrize(
    ("pattern", "is_bad"),
    [
        (r'"(?:[^"\\]|\\.)*"', True),
        (r'"(?:[^"\\]|\\.){0,1000}"', False),
        (r"(a(?:bc)+)?", True),
        (r"\d+|[ab]*", False),
        (r"x(?=(?:ab)*)", True),
        (r"(?:ab){0,3}", False),
    ],
)
def test_what_such_a_pattern_is(pattern: str, is_bad: bool) -> None:
    assert remembers(_parser.parse(pattern)) is is_bad


@pytest.mark.parametrize("content", ["a", "\\n"])
def test_a_long_string_in_the_text_form_is_read_in_the_memory_of_a_few_of_it(content: str) -> None:
    text = f'"{content * (4_000_000 // len(content))}"'
    tracemalloc.start()
    try:
        Literals(text).value(None)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()
