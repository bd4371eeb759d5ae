"""Run one case of the matrix through the public interface and measure how far it is from one device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.zoo import ZOO, Built, BuiltFunction, BuiltModel, Options, Trace, train
from tests.zoo.case import Array
from tests.zoo.oracle import as_arrays, model_variables

from .cases import MatrixCase
from .report import Exchange, exchanges_of, notes_of, report_of

# An error is relative to the largest value of its tensor; the floor stands in where that is all but zero.
RTOL = {"float64": 1e-9, "float32": 1e-5}
FLOOR = {"float64": 1e-6, "float32": 1e-2}
TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Result:
    """How one case came out."""

    case: MatrixCase
    errors: Mapping[str, float]  # "step 2 loss:0" or a variable's name -> relative error
    exchanges: Mapping[str, Exchange]  # variable -> what the replicas exchange for its gradient
    notes: tuple[str, ...]  # ops that have no rule, and other costs
    seconds: float

    @property
    def worst(self) -> str:
        """Return the name of what differs most."""
        return max(self.errors, key=lambda name: self.errors[name])

    @property
    def max_error(self) -> float:
        """Return the largest relative error."""
        return self.errors[self.worst]

    @property
    def tolerance(self) -> float:
        """Return the relative error that this case may have."""
        return ZOO[self.case.model].loose.get(self.case.dtype, RTOL[self.case.dtype])

    @property
    def ok(self) -> bool:
        """Return whether everything equals the single-device run."""
        return self.max_error <= self.tolerance

    def explain(self) -> str:
        """Say what differs, worst first."""
        wrong = sorted((-error, name) for name, error in self.errors.items() if error > self.tolerance)
        lines = [f"{name}: {-error:.2e}" for error, name in wrong[:12]]
        return f"{self.case}: {len(wrong)} of {len(self.errors)} values differ\n  " + "\n  ".join(lines)


def run_case(case: MatrixCase) -> Result:
    """Train on one device and on replicas, and compare every output, variable, slot and metric."""
    start = time.perf_counter()
    options = Options(
        optimizer=case.optimizer,
        dtype=case.dtype,
        reduction=case.reduction,
        batch=case.sizes[0] if case.static else None,
    )
    expected = truth(case.model, options, case.sizes)
    config = {
        "devices": [f"CPU:{i}" for i in range(case.replicas)],
        "strategy": {"name": case.strategy, "variables": case.variables},
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    actual, report = distributed(ZOO[case.model].build(options), config, case.sizes)
    return Result(
        case=case,
        errors=dict(compare(actual, expected, FLOOR[case.dtype])),
        exchanges=exchanges_of(report),
        notes=notes_of(report),
        seconds=time.perf_counter() - start,
    )


@lru_cache(maxsize=32)
def truth(model: str, options: Options, sizes: tuple[int, ...]) -> Trace:
    """Return the single-device run; cases that differ only in how they are distributed share it."""
    return train(ZOO[model].build(options), sizes)


@singledispatch
def distributed(built: Any, config: Mapping[str, Any], sizes: Sequence[int]) -> tuple[Trace, Any]:
    """Train a zoo entry under a config; return what it leaves behind, and the report of its rewrite."""
    raise TypeError(f"not a zoo entry: {type(built).__name__}")


@distributed.register
def _(built: Built, config: Mapping[str, Any], sizes: Sequence[int]) -> tuple[Trace, Any]:
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs) or None,
    )
    new = ar.rewrite(item, dict(config))
    outputs = []
    with new.session() as session:
        session.run(new.init_op)
        for step, batch in enumerate(sizes):
            values = session.run([*built.outputs, built.train_op], feed_dict=built.feeds(step, batch))
            outputs.append(dict(zip(built.outputs, values, strict=False)))
        variables = session.read_variables()
    return Trace(tuple(outputs), variables), report_of(new)


@distributed.register
def _(built: BuiltFunction, config: Mapping[str, Any], sizes: Sequence[int]) -> tuple[Trace, Any]:
    step = ar.distribute(built.step, dict(config), *built.specs, batch_inputs=dict(built.batch_inputs))
    outputs = [as_arrays(step(*map(tf.constant, built.feeds(at, batch)))) for at, batch in enumerate(sizes)]
    return Trace(tuple(outputs), as_arrays(built.variables)), report_of(step)


@distributed.register
def _(built: BuiltModel, config: Mapping[str, Any], sizes: Sequence[int]) -> tuple[Trace, Any]:
    model = ar.distribute(built.model, dict(config))
    outputs = []
    for step, batch in enumerate(sizes):
        x, y = built.feeds(step, batch)
        outputs.append(as_arrays(model.train_on_batch(x, y, return_dict=True)))
    return Trace(tuple(outputs), model_variables(model)), report_of(model.train_function)


def compare(actual: Trace, expected: Trace, floor: float) -> Iterator[tuple[str, float]]:
    """Yield the relative error of every output of every step and of every final variable."""
    for step, (left, right) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        for name, value in right.items():
            yield f"step {step} {name}", relative_error(left[name], value, floor)
    for name, value in expected.variables.items():
        yield name, relative_error(actual.variables[name], value, floor)


def relative_error(actual: Array, expected: Array, floor: float) -> float:
    """Return max |actual - expected| relative to max |expected|; integers must be equal."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    if expected.size == 0:
        return 0.0
    error = float(np.abs(actual - expected).max() / (np.abs(expected).max() + floor))
    return error if np.isfinite(error) else float("inf")
