"""The state of callbacks as plain data: numbers, texts, arrays and names of functions; the rest stays as it was made.

EarlyStopping   wait 2, best 0.31, best_weights [w]   ->   {"wait": 2, "best": 0.31, "best_weights": {"list": ...}}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ITS_OWN = ("BackupAndRestore", "CSVLogger", "TensorBoard")
"""Callbacks that hold files, and find in them what they need."""


class _NotPlainError(Exception):
    """A value is no plain data."""


def state_of(callback: Any, arrays: list[Array]) -> dict[str, Any]:
    """Return the attributes of a callback that are plain data.

    Args:
        callback: of Keras, or the program's own.
        arrays: where its arrays are added.
    """
    found: dict[str, Any] = {}
    if any(kind.__name__ in _ITS_OWN for kind in type(callback).__mro__):
        return found
    for name, value in vars(callback).items():
        own: list[Array] = []
        try:
            found[name] = _plain(value, own, len(arrays))
        except _NotPlainError:
            continue
        arrays += own
    return found


def set_state(callback: Any, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    """Give a callback the attributes that it had.

    Args:
        callback: made anew by the program.
        arrays: all arrays of the snapshot.
    """
    for name, value in state.items():
        setattr(callback, name, _back(value, arrays))


def _plain(value: Any, arrays: list[Array], first: int) -> Any:
    """Return a value as plain data, arrays as their numbers."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        arrays.append(np.asarray(value))
        return {"array": first + len(arrays) - 1, "scalar": isinstance(value, np.generic)}
    if isinstance(value, FunctionType) and _named(value.__module__, value.__qualname__) is value:
        return {"function": [value.__module__, value.__qualname__]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(element, arrays, first) for element in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _plain(element, arrays, first) for key, element in value.items()}}
    raise _NotPlainError


def _named(module: str, name: str) -> Any:
    """Return a function of a module that is imported, as `keras.ops.less`; None if there is none."""
    return getattr(sys.modules.get(module), name, None)


def _back(value: Any, arrays: Sequence[Array]) -> Any:
    """Return the value that plain data stands for."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]]
        return array[()] if value["scalar"] else array.copy()
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {key: _back(element, arrays) for key, element in inner.items()}
    if kind == "function":
        return _named(*inner)
    elements = [_back(element, arrays) for element in inner]
    return tuple(elements) if kind == "tuple" else elements
