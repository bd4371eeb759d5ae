"""Train a graph in a session and keep what every step gave: outputs, and variables in all their copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.check.report import Deviation, deviation, epsilon
from autograph_rewrite.check.side_by_side import TrainedGraph, invent

Array = np.ndarray[Any, Any]
Values = dict[str, list[Array]]
TIMEOUT_SECONDS = 60.0


class StepError(Exception):
    """A graph that cannot be initialised or trained; `place` says when."""

    def __init__(self, place: str, error: Exception) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if not line.startswith(("Graph execution", "Detected at", "Node:"))]
        super().__init__(f"{place}: {type(error).__name__}: {(told or lines or [''])[0]}"[:500])


@dataclass(frozen=True)
class Run:
    """What a graph gave.

    Attributes:
        made: the variables as the initialisers made them, in all their copies.
        initial: the variables that training began with.
        steps: after each step, outputs and variables.
    """

    made: Values
    initial: Mapping[str, Array]
    steps: tuple[Values, ...]


def train(
    item: ar.GraphItem,
    feeds: Sequence[Mapping[str, Any]],
    given: Mapping[str, Any],
    initial: Mapping[str, Array] | None = None,
    *,
    optimised: bool = False,
) -> Run:
    """Train a graph.

    Args:
        item: an original or rewritten one.
        feeds: of each step.
        given: values of variables that nothing initialises.
        initial: what training begins with; left out: what the initialisers make.
        optimised: let TensorFlow optimise the graph, which takes long.

    Raises:
        StepError: it fails.
        ClusterError: a step hangs.
    """
    place = "initialisation"
    with TrainedGraph(item, TIMEOUT_SECONDS, _settings(optimised)) as trainee:
        try:
            trainee.initialise()
            rng = np.random.default_rng(1)
            values = {n: invent(item.variables[n], rng) for n in sorted(trainee.unset - set(given))} | dict(given)
            trainee.write(values)
            made = _copied(trainee)
            begin = {name: copies[0] for name, copies in made.items()} if initial is None else dict(initial)
            trainee.write({name: np.array(value) for name, value in begin.items()})
            steps = []
            for i, feed in enumerate(feeds):
                place = f"step {i + 1}"
                outputs = {f"output {name}": [value] for name, value in trainee.step(feed).items()}
                steps.append(outputs | {f"variable {name}": copies for name, copies in _copied(trainee).items()})
        except trainee.failures as error:
            raise StepError(place, error) from error
    return Run({f"variable {name}": copies for name, copies in made.items()}, begin, tuple(steps))


def _copied(trainee: TrainedGraph) -> Values:
    """Return all variables; what a session gives may be memory that later steps write to."""
    return {name: [np.array(value) for value in copies] for name, copies in trainee.read()}


def nudged(initial: Mapping[str, Array], attempt: int) -> dict[str, Array]:
    """Return variables that differ in their last bit."""
    rng = np.random.default_rng([attempt, 2])

    def change(value: Array) -> Array:
        if value.dtype.kind != "f":
            return value
        return np.asarray(value * (1 + epsilon(value) * rng.choice((-1.0, 1.0), value.shape)), value.dtype)

    return {name: change(value) for name, value in initial.items()}


def deviations(expected: Run, got: Run, rtol: float, *, made: bool = True) -> dict[str, Deviation]:
    """Return the largest deviation of every output and variable, over steps and copies."""
    worst: dict[str, Deviation] = {}
    pairs = [("at the start", expected.made, got.made)] if made else []
    pairs += [(f"step {i + 1}", a, b) for i, (a, b) in enumerate(zip(expected.steps, got.steps, strict=True))]
    for place, left, right in pairs:
        for name, (value, *_) in left.items():
            for copy, other in enumerate(right[name]):
                found = deviation(other, value, rtol)
                if name not in worst or found.error > worst[name].error:
                    where = ", ".join(filter(None, [place, found.where, f"copy {copy}" if copy else ""]))
                    worst[name] = found._replace(where=where)
    return worst


def is_meaningless(run: Run) -> bool:
    """Tell whether no output stays finite."""
    values = [v for name, (v, *_) in run.steps[-1].items() if v.dtype.kind == "f" and v.size]
    return bool(values) and not any(np.isfinite(value).all() for value in values)


def _settings(optimised: bool) -> Any:
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimised
    return config
