"""Run a rewrite with a mistake in it beside what one device computes, and say whether anything came out differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autograph_rewrite import GraphItem
from tests.seeded_mistakes.draws import TIMEOUT_SECONDS, Draw

TOLERANCE = 1e-9
FLOOR = 1e-6
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outcome:
    """What an execution showed.

    Attributes:
        verdict: unchanged, changed, failed (an error) or hang.
        detail: what differs most, or the error.
    """

    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class Trained:
    """The outputs of every step, and all variables at the end."""

    outputs: tuple[Mapping[str, Array], ...]
    variables: Mapping[str, Array]


def run(item: GraphItem, feeds: Sequence[Mapping[str, Any]], timeout_seconds: float = 60) -> Trained:
    """Train an item, original or rewritten."""
    names = list(item.outputs)
    outputs = []
    milliseconds = int(timeout_seconds * 1000)
    with item.session() as session:
        session.run(item.init_op, timeout_ms=milliseconds)
        for feed in feeds:
            got = session.run([*names, *item.targets], dict(feed), timeout_ms=milliseconds)
            outputs.append(dict(zip(names, map(np.asarray, got), strict=False)))
        variables = session.read_variables()
    return Trained(tuple(outputs), variables)


@lru_cache(maxsize=4)
def truth(draw: Draw) -> Trained:
    """Return what one device computes."""
    return run(draw.item, draw.feeds())


def execute(draw: Draw, rewritten: GraphItem) -> Outcome:
    """Run the rewritten item of a draw, and compare all outputs and variables."""
    expected = truth(draw)
    try:
        actual = run(rewritten, draw.feeds(), TIMEOUT_SECONDS)
    except Exception as error:  # any failure is an outcome
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        is_hang = "DeadlineExceeded" in text or "hang" in text or "timed out" in text or "did not finish" in text
        return Outcome("hang" if is_hang else "failed", text)
    name, error = worst(actual, expected)
    return Outcome("changed" if error > TOLERANCE else "unchanged", f"{name}: {error:.1e}")


def worst(actual: Trained, expected: Trained) -> tuple[str, float]:
    """Return what differs most, and by how much relative to its largest element."""
    errors = {}
    for step, (left, right) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        errors |= {f"step {step}, {name}": difference(left[name], value) for name, value in right.items()}
    errors |= {name: difference(actual.variables[name], value) for name, value in expected.variables.items()}
    name = max(errors, key=lambda name: errors[name])
    return name, errors[name]


def difference(actual: Array, expected: Array) -> float:
    """Return the largest deviation relative to the largest element."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    if not expected.size:
        return 0.0
    if not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return float("inf")
    error = float(np.nanmax(np.abs(actual - expected)) / (np.nanmax(np.abs(expected)) + FLOOR))
    return error if np.isfinite(error) else 0.0
