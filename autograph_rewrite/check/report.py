"""Define VerifyReport, the result of a numeric comparison, and the error norm that it uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.variable_uses import declared_trained
from autograph_rewrite.notebook import NotebookView, table, text
from autograph_rewrite.resolve.coverage import Coverage
from autograph_rewrite.training_graph import Variable

NOISE_FACTOR = 16.0
"""An error up to this many times the measured effect of rounding still counts as rounding."""
SHOWN = 20
NAME_WIDTH = 60
FAILED_STEP = "(step)"
"""The name of the row that says how the rewritten graph failed."""


@dataclass(frozen=True)
class ComparedTensor:
    """One compared tensor.

    Attributes:
        name: of the variable or output.
        kind: "variable", "slot" or "output".
        error: largest difference over the steps, relative to the tensor's largest value; inf if integers, shapes or
            types differ.
        max_abs: largest value of the original.
        where: step and element (and copy of the variable) of the largest difference.
        ok: whether the error is within the tolerance, or is explained by rounding.
        noise: error of the original against itself with its variables changed in the last bit; measured only if a
            tensor is over the tolerance.
    """

    name: str
    kind: str
    error: float
    max_abs: float
    where: str
    ok: bool = True
    noise: float = 0.0


@dataclass(frozen=True, repr=False)
class VerifyReport(NotebookView):
    """The result of `verify`. `ok` is the verdict, `str()` shows the rows, `data()` is for programs.

    Attributes:
        ok: whether the rewritten graph computes the same as the original.
        max_error: the largest relative error of all rows.
        rows: worst first.
        config: strategy, mode, devices and semantics of the compared rewrite.
        batch: examples per step; None if the caller gave the feeds.
        notes: limits and circumstances of this comparison.
        covered: the share of the rewritten step that is divided; None if the rewritten graph was given.
        advice: steps to try next if a value differs.
    """

    ok: bool
    max_error: float
    rows: tuple[ComparedTensor, ...]
    config: Mapping[str, Any]
    steps: int
    batch: int | None
    rtol: float
    notes: tuple[str, ...]
    seconds: float
    covered: Coverage | None = None
    advice: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[ComparedTensor, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if not row.ok)

    def __str__(self) -> str:
        shown = self.rows[: max(SHOWN, len(self.wrong[: 2 * SHOWN]))]
        lines = [self._verdict(), "", *_table(shown)]
        rest = self.rows[len(shown) :]
        if rest:
            lines.append(f"... and {len(rest)} more, errors up to {rest[0].error:.1e}")
        if self.covered is not None and self.covered.parts > 1:
            lines += [str(self.covered), *(f"whole: {line}" for line in self.covered.lines())]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"next: {text}" for text in self.advice]
        return "\n".join(lines)

    def _html_parts(self) -> Iterator[str]:
        columns = ("#error", "", "kind", "name", "#max |value|", "where")
        rows = ((f"{r.error:.1e}", _said(r), r.kind, r.name, f"{r.max_abs:.3g}", r.where) for r in self.rows)
        yield table(columns, rows)
        said = [str(self.covered)] if self.covered is not None and self.covered.parts > 1 else []
        yield text(
            "\n".join([*said, *(f"note: {one}" for one in self.notes), *(f"next: {one}" for one in self.advice)])
        )

    def _verdict(self) -> str:
        config = self.config
        devices = ", ".join(device.removeprefix("/device:") for device in config["devices"])
        kept = (
            f"{len(self.wrong)} of {len(self.rows)} values differ" if self.wrong else f"{len(self.rows)} values agree"
        )
        within, rounded = "", [row for row in self.rows if row.ok and row.noise]
        if rounded:
            most = max(row.noise for row in rounded)
            within = f", {len(rounded)} of them within rounding, by which one device is off by up to {most:.1e}, too"
        examples = f" of {self.batch} examples" if self.batch is not None else ""
        error = max((row.error for row in self.rows if not (row.ok and row.noise)), default=0.0)
        worst = f"worst error {error:.1e}, allowed {self.rtol:.0e}; {self.seconds:.1f} s"
        return (
            f"{'ok' if self.ok else 'MISMATCH'}: {kept} after {self.steps} steps{examples}{within}; "
            f"{config['strategy']}, {config['mode']}, {devices}; {worst}"
        )

    def data(self) -> dict[str, Any]:
        """Return the report as plain data; an infinite error is the string "inf", because JSON has no such number."""
        return {
            "ok": self.ok,
            "max_error": _number(self.max_error),
            "rtol": self.rtol,
            "steps": self.steps,
            "batch": self.batch,
            "coverage": self.covered.share if self.covered is not None else None,
            "seconds": self.seconds,
            "config": dict(self.config),
            "notes": list(self.notes),
            "next": list(self.advice),
            "rows": [
                {key: _number(value) if isinstance(value, float) else value for key, value in vars(row).items()}
                for row in self.rows
            ],
        }


def _number(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)


def _said(row: ComparedTensor) -> str:
    return "" if row.ok and not row.noise else "rounding" if row.ok else "DIFFERS"


def _table(rows: tuple[ComparedTensor, ...]) -> list[str]:
    """Return aligned lines: error, verdict, kind, name, size of the values, place."""
    cells = [("error", "", "kind", "name", "max |value|", "where")]
    for row in rows:
        name = row.name if len(row.name) <= NAME_WIDTH else f"...{row.name[3 - NAME_WIDTH :]}"
        cells.append((f"{row.error:.1e}", _said(row), row.kind, name, f"{row.max_abs:.3g}", row.where))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    used = [column for column, width in enumerate(widths) if width]
    return ["  ".join(line[column].ljust(widths[column]) for column in used).rstrip() for line in cells]


def rows_of(
    variables: Mapping[str, Variable],
    worst: Mapping[str, Deviation],
    rtol: float,
    noise: Mapping[str, float],
    broken: str = "",
) -> tuple[ComparedTensor, ...]:
    """Return the rows, worst first: rows that differ before rows that agree.

    Args:
        worst: deviations by "variable NAME" or "output NAME".
        noise: by the same keys, the error that rounding alone causes; empty if nothing is over the tolerance.
        broken: how the rewritten graph failed; empty if it did not.
    """
    trained = declared_trained(variables)
    rows = [ComparedTensor(FAILED_STEP, "output", float("inf"), 0.0, broken, ok=False)] if broken else []
    for key, found in worst.items():
        kind, _, name = key.partition(" ")
        if kind == "variable" and _is_slot(variables[name], trained):
            kind = "slot"
        jitter = noise.get(key, 0.0) if found.error > rtol else 0.0
        ok = found.error <= max(rtol, NOISE_FACTOR * jitter)
        rows.append(ComparedTensor(name, kind, found.error, found.max_abs, found.where, ok, jitter))
    return tuple(sorted(rows, key=lambda row: (row.ok, -row.error)))


def _is_slot(variable: Variable, trained: Collection[str]) -> bool:
    """Recognise an optimizer's variable by its name: `w/Adam` (TensorFlow) or `adam/layer_w_momentum` (Keras)."""
    if variable.trainable:
        return False
    name = variable.name
    return any(name.startswith(f"{each}/") or f"/{each.replace('/', '_')}_" in name for each in trained)


# The error norm: the largest deviation relative to the largest value, so that tiny elements do not dominate.

Array = np.ndarray[Any, Any]

# Tensors whose largest value is smaller than this are measured against this value: where the exact result is zero, both
# graphs compute rounding errors, and their ratio means nothing.
_FLOOR, _FLOOR_OF_DOUBLE = 1e-5, 1e-9
_EPSILONS = 4
"""For a type too coarse for `rtol`, the tolerance is this many distances between neighbouring numbers."""


class Deviation(NamedTuple):
    """The largest difference relative to the tensor's largest value, that value, and the place of the difference."""

    error: float
    max_abs: float
    where: str


def deviation(actual: Array, expected: Array, rtol: float, atol: float | None = None) -> Deviation:
    """Compare two arrays.

    Args:
        actual: of the rewritten graph.
        expected: of the original.
        atol: a difference up to this is always within the tolerance; by default 1e-5 times `rtol`, for float64 1e-9
            times `rtol`.
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
    is_double = expected.dtype.name in ("float64", "complex128")
    floor = atol / rtol if atol is not None and rtol else _FLOOR_OF_DOUBLE if is_double else _FLOOR
    worst = int(differences.argmax())
    error = float(differences[worst]) / max(largest, floor) * _leniency(expected, rtol)
    return Deviation(error, largest, _place(expected, worst) if error else "")


def _leniency(array: Array, rtol: float) -> float:
    """Return the factor by which errors of a coarse type count less."""
    coarse = _EPSILONS * epsilon(array)
    return min(1.0, rtol / coarse) if coarse > 0 else 1.0


def epsilon(array: Array) -> float:
    """Return the relative distance of neighbouring numbers of an array's type."""
    if array.dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(array.dtype).eps) if array.dtype.kind in "fc" else 2.0**-3


def _is_inexact(array: Array) -> bool:
    return array.dtype.kind in "fc" or "float" in array.dtype.name  # numpy does not know bfloat16 and float8


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
