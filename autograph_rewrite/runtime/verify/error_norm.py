"""The error norm: the largest deviation relative to the largest value, so that tiny elements do not dominate."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# Below this size, values are measured as if they were of this size: where the exact result is zero, both graphs
# compute rounding errors, and their ratio means nothing.
_FLOOR, _FLOOR_OF_DOUBLE = 1e-5, 1e-9
_EPSILONS = 4
"""A type that cannot hold `rtol` is compared to this many of its own steps."""


class Deviation(NamedTuple):
    """The largest difference: relative to the tensor, the largest value, and where it is."""

    error: float
    max_abs: float
    where: str


def deviation(actual: Array, expected: Array, rtol: float, atol: float | None = None) -> Deviation:
    """Compare two arrays.

    Args:
        actual: of the rewritten graph.
        expected: of the original.
        rtol: the tolerance of the relative error.
        atol: differences up to here are within the tolerance whatever the values are; by default `rtol` times 0.01,
            for float64 times 1e-6.
    """
    if actual.shape != expected.shape:
        return Deviation(float("inf"), _largest(expected), f"shape {actual.shape} instead of {expected.shape}")
    if actual.dtype != expected.dtype:
        return Deviation(float("inf"), _largest(expected), f"type {actual.dtype} instead of {expected.dtype}")
    if not expected.size:
        return Deviation(0.0, 0.0, "")
    if not _is_inexact(expected):
        wrong = np.flatnonzero(actual.ravel() != expected.ravel())
        place = _place(expected, int(wrong[0])) if wrong.size else ""
        return Deviation(float("inf") if wrong.size else 0.0, _largest(expected), place)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    left, right = actual.astype(wide).ravel(), expected.astype(wide).ravel()
    with np.errstate(all="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        differences = np.where(same, 0.0, np.abs(left - right))
    differences[~np.isfinite(differences)] = np.inf
    finite = np.abs(right[np.isfinite(right)])
    largest = float(finite.max()) if finite.size else 0.0
    floor = atol / rtol if atol is not None and rtol else _FLOOR_OF_DOUBLE if _is_double(expected) else _FLOOR
    worst = int(differences.argmax())
    error = float(differences[worst]) / max(largest, floor) * _leniency(expected, rtol)
    return Deviation(error, largest, _place(expected, worst) if error else "")


def _leniency(array: Array, rtol: float) -> float:
    """Return by how much an error of a coarse type counts less."""
    coarse = _EPSILONS * epsilon(array)
    return min(1.0, rtol / coarse) if coarse > 0 else 1.0


def epsilon(array: Array) -> float:
    """Return the relative distance of neighbouring numbers of an array's type."""
    if array.dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(array.dtype).eps) if array.dtype.kind in "fc" else 2.0**-3


def _is_inexact(array: Array) -> bool:
    return array.dtype.kind in "fc" or "float" in array.dtype.name  # numpy does not know bfloat16 and float8


def _is_double(array: Array) -> bool:
    return array.dtype.name in ("float64", "complex128")


def _largest(array: Array) -> float:
    if array.dtype.kind in "biu" and array.size:
        return float(np.abs(array.astype(np.float64)).max())
    return 0.0


def _place(array: Array, flat: int) -> str:
    if not array.ndim:
        return ""
    index = tuple(int(i) for i in np.unravel_index(flat, array.shape))
    return "element " + str(list(index))


def is_all_finite(array: Array) -> bool:
    """Return whether an array has neither infinities nor NaNs."""
    return not _is_inexact(array) or bool(np.isfinite(array.astype(np.complex128)).all())
