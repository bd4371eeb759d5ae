"""Names of Keras variables: the map from tf.Variable to the path by which Keras users know it.

A traced function only shows tf.Variables. The Keras objects are found where the function finds them:
in its closure, its bound object, its partial arguments and the globals that it names.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

_DEPTH = 6
_BUDGET = 20_000
_SKIPPED = ("tensorflow", "tf_keras", "numpy", "builtins", "typing", "abc")


def keras_variables(*roots: Any) -> dict[int, Any]:
    """Return `id(tf.Variable)` -> Keras variable for what is reachable from `roots`."""
    found: dict[int, Any] = {}
    if "keras" not in sys.modules:
        return found
    seen: set[int] = set()
    frontier = list(roots)
    for _ in range(_DEPTH):
        following: list[Any] = []
        for item in frontier:
            if id(item) in seen or len(seen) > _BUDGET:
                continue
            seen.add(id(item))
            following += _inside(item, found)
        frontier = following
    return found


def _inside(item: Any, found: dict[int, Any]) -> Iterator[Any]:
    """Yield what to look at next; Keras objects are asked for their variables instead."""
    if _is_keras(item):
        for variable in _variables_of(item):
            found.setdefault(id(getattr(variable, "value", None)), variable)
    elif isinstance(item, Mapping):
        yield from list(item.values())
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from _referenced(item)
    elif hasattr(item, "python_function"):
        yield item.python_function
    elif not isinstance(item, type | types.ModuleType) and not _is_skipped(item):
        yield from list(getattr(item, "__dict__", {}).values())


def _is_keras(item: Any) -> bool:
    return any(base.__module__.startswith("keras.") for base in type(item).__mro__)


def _is_skipped(item: Any) -> bool:
    """Return whether nothing of Keras 3 is below an object: the variables of tf_keras are TensorFlow's."""
    return any(base.__module__.partition(".")[0] in _SKIPPED for base in type(item).__mro__ if base is not object)


def _variables_of(item: Any) -> Iterator[Any]:
    if hasattr(item, "path") and hasattr(item, "value"):
        yield item
        return
    for owner in (item, getattr(item, "optimizer", None), *(getattr(item, "metrics", None) or ())):
        yield from getattr(owner, "variables", None) or ()


def _referenced(function: types.FunctionType) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from (function.__defaults__ or ())
    yield getattr(function, "__wrapped__", None)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty cell raises
    except ValueError:
        return False
    return True
