"""Single steps of two graphs from the same variables, until something comes out differently.

Every step begins with the original's variables in both graphs, so what differs behind it was made in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.runtime.bisect.values import Tap, tap, tensor_name, values_of_step
from autograph_rewrite.runtime.verify.error_norm import Array, Deviation, deviation, epsilon
from autograph_rewrite.runtime.verify.report import NOISE_FACTOR
from autograph_rewrite.runtime.verify.side_by_side import Tolerance, Training, first_line, invent
from autograph_rewrite.runtime.verify.trained_graph import TrainedGraph
from autograph_rewrite.training_graph import TrainingGraph

Values = Mapping[str, Array]


@dataclass(frozen=True)
class WrongStep:
    """The first step in which two graphs differ.

    Attributes:
        number: of the step, from 0.
        starts: the variables before each step up to this one.
        expected: values of the original in this step, by tensor.
        errors: of the values that can be compared, by tensor of the original.
        noise: what rounding does to them.
        variables: those that differ behind the step.
        outputs: those that differ.
        failed: how the step failed; empty where it did not.
    """

    number: int
    starts: Sequence[Values]
    expected: Values
    errors: Mapping[str, Deviation]
    noise: Mapping[str, float]
    variables: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    failed: str = ""

    def differs(self, tensor: str, rtol: float) -> bool | None:
        """Return whether a value differs; None where it was not looked at."""
        found = self.errors.get(tensor)
        return None if found is None else found.error > max(rtol, NOISE_FACTOR * self.noise.get(tensor, 0.0))


@dataclass(frozen=True)
class SideBySide:
    """Two graphs and what they are trained on.

    Attributes:
        flat: the original in normal form.
        other: a rewritten item, or one that passes have edited.
        training: feeds, steps, initial values.
        allowed: which error is none.
        timeout: seconds that a run may take.
        apart: what differs by design ("variable NAME", "output NAME").
    """

    flat: TrainingGraph
    other: TrainingGraph
    training: Training
    allowed: Tolerance
    timeout: float
    apart: Collection[str] = ()

    def first_wrong_step(self) -> WrongStep | None:
        """Return the first step in which variables or outputs differ; None where none does."""
        values = list(values_of_step(self.flat))
        names = [tensor_name(value) for value in values]
        taps = [found for value in values if (found := tap(self.other, value)) is not None]
        starts: list[Values] = []
        with TrainedGraph(self.flat, self.timeout) as left, TrainedGraph(self.other, self.timeout) as right:
            self._start(left, right)
            for number in range(self.training.steps):
                starts.append({name: copies[0] for name, copies in left.read()})
                right.write(starts[-1])
                feeds = self.training.feeds_of(number)
                expected: Values = {}
                try:
                    expected = dict(zip(names, left.observe(feeds, names), strict=True))
                    got = iter(right.observe(feeds, [tensor for one in taps for tensor in one.tensors]))
                except right.failures as error:  # of the original, that there is no value in this step
                    return WrongStep(number, starts, expected, {}, {}, failed=first_line(error))
                seen = [(one, [next(got) for _ in one.tensors]) for one in taps]
                errors = {one.name: _error(one, arrays, expected[one.name], self.allowed) for one, arrays in seen}
                step = self._judged(number, starts, expected, errors, self._variables(left, right))
                if step.variables or step.outputs:
                    return step
        return None

    def _start(self, left: TrainedGraph, right: TrainedGraph) -> None:
        left.initialise()
        right.initialise()
        rng = np.random.default_rng([self.training.seed, 1])
        unset = sorted(left.unset - set(self.training.values))
        left.write({**self.training.values, **{name: invent(self.flat.variables[name], rng) for name in unset}})

    def _variables(self, left: TrainedGraph, right: TrainedGraph) -> dict[str, Deviation]:
        """Return how far the variables are from the original's, the worst of their copies."""
        found = {}
        for (name, (expected, *_)), (_, copies) in zip(left.read(), right.read(), strict=True):
            each = [deviation(copy, expected, self.allowed.rtol, self.allowed.atol) for copy in copies]
            found[name] = max(each, key=lambda one: one.error)
        return found

    def _judged(
        self,
        number: int,
        starts: Sequence[Values],
        expected: Values,
        errors: Mapping[str, Deviation],
        variables: Mapping[str, Deviation],
    ) -> WrongStep:
        """Return the step with what differs by more than rounding explains."""
        outputs = {name: errors.get(_full(info.tensor)) for name, info in self.flat.outputs.items()}
        suspects = {f"variable {name}": one.error for name, one in variables.items()}
        suspects |= {f"output {name}": one.error for name, one in outputs.items() if one is not None}
        over = {key for key, error in suspects.items() if error > self.allowed.rtol} - set(self.apart)
        noise = self._noise(starts, expected) if over else {}
        step = WrongStep(number, starts, expected, errors, noise)
        wrong_outputs = tuple(
            name
            for name, info in self.flat.outputs.items()
            if f"output {name}" in over and step.differs(_full(info.tensor), self.allowed.rtol)
        )
        wrong = tuple(
            name
            for name, one in variables.items()
            if f"variable {name}" in over and one.error > NOISE_FACTOR * noise.get(f"variable {name}", 0.0)
        )
        return WrongStep(number, starts, expected, errors, noise, wrong, wrong_outputs)

    def _noise(self, starts: Sequence[Values], expected: Values) -> dict[str, float]:
        """Return how far the original's values are from themselves when variables change in the last bit."""
        rng = np.random.default_rng([self.training.seed, 2])

        def nudged(value: Array) -> Array:
            if value.dtype.kind != "f":
                return value
            return np.asarray(value * (1 + epsilon(value) * rng.choice((-1.0, 1.0), value.shape)), value.dtype)

        names = list(expected)
        last = {name: nudged(value) for name, value in starts[-1].items()}
        left, before = self.replay(self.flat, starts, names)
        right, after = self.replay(self.flat, [*starts[:-1], last], names)
        rtol, atol = self.allowed.rtol, self.allowed.atol
        found = {name: deviation(a, b, rtol, atol).error for name, a, b in zip(names, right, left, strict=True)}
        for name, value in before.items():
            found[f"variable {name}"] = deviation(after[name], value, rtol, atol).error
        return found

    def replay(
        self, item: TrainingGraph, starts: Sequence[Values], tensors: Sequence[str]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Train an item from known variables in each step; return tensors in the last one, and variables behind it.

        Args:
            item: an original, or what became of one.
            starts: the variables before each step.
            tensors: names of what is asked for in the last one.
        """
        got: list[Array] = []
        with TrainedGraph(item, self.timeout) as trainee:
            trainee.initialise()
            for number, values in enumerate(starts):
                trainee.write(values)
                got = trainee.observe(self.training.feeds_of(number), tensors if number == len(starts) - 1 else ())
            return got, {name: copies[0] for name, copies in trainee.read()}


def _error(one: Tap, arrays: Sequence[Array], expected: Array, allowed: Tolerance) -> Deviation:
    """Return how far instances are from the original's value; infinitely far where they do not fit together."""
    try:
        return one.deviation(arrays, expected, allowed)
    except ValueError as error:
        return Deviation(float("inf"), 0.0, first_line(error))


def _full(tensor: str) -> str:
    return tensor if ":" in tensor else f"{tensor}:0"
