"""Several steps in one loop inside a graph (`steps_per_run`), around a function that does one.

    while number < count:     each stacked argument gives its row `number`, the others are the same in every step
        results = step(...)   all replicas are in the one body, so their collectives meet in one loop
    results                   those of the last step

An iteration begins when the one before has ended, with all that it writes: the call of the step is one node, and the
loop carries what it returns. If a step fails, for its data have ended, those before it stay done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autograph_rewrite.requires import tensorflow

OneStep = Callable[[Sequence[Any]], tuple[list[Any], Any]]
"""Adds one step; returns its results, and the operation that does it."""


class Stacked(NamedTuple):
    """How the steps of a run are given their arguments.

    Attributes:
        rows: for each argument, whether its rows are those of the steps.
        steps: how many there are where no argument has rows.
    """

    rows: tuple[bool, ...]
    steps: int


def run_steps(step: OneStep, types: Sequence[Any], inputs: Sequence[Any], stacked: Stacked) -> tuple[Any, list[Any]]:
    """Add the loop to the graph under construction; return how many steps it has done, and the last step's results.

    Args:
        inputs: tensors, [steps, ...] those that have rows.
    """
    tf = tensorflow()
    sizes = [tf.shape(one)[0] for one, has_rows in zip(inputs, stacked.rows, strict=True) if has_rows]
    count = sizes[0] if sizes else tf.constant(stacked.steps)

    def one_step(number: Any, *_: Any) -> list[Any]:
        given = [tf.gather(x, number) if rows else x for x, rows in zip(inputs, stacked.rows, strict=True)]
        results, done = step(given)
        with tf.control_dependencies([done]):
            return [number + 1, *(tf.identity(result) for result in results)]

    number, *results = tf.while_loop(
        lambda number, *_: number < count,
        one_step,
        [tf.constant(0), *(tf.zeros([], dtype) for dtype in types)],
        shape_invariants=[tf.TensorShape([]), *(tf.TensorShape(None) for _ in types)],
        parallel_iterations=1,
    )
    return number, results


class LoopedCall:
    """Does several steps in one eager call; called as the function that does one.

    Args:
        step: adds a call of it.
        types: of its results.
        execute: runs a function by its name, given the number of results, inputs and what cancels it; None: not here.
    """

    def __init__(self, step: OneStep, types: Sequence[Any], execute: Callable[..., list[Any]] | None) -> None:
        self._tf = tensorflow()
        self._step, self._types, self._execute = step, list(types), execute
        self._concrete = functools.cache(self._trace)

    def __call__(self, inputs: Sequence[Any], stacked: Stacked, cancellation: Any = None) -> list[Any]:
        """Do the steps; return the results of the last one.

        Args:
            inputs: one tensor per argument.
            stacked: which of them have rows.
            cancellation: what `cancellation_manager` gave.
        """
        concrete = self._concrete(stacked, tuple(one.dtype for one in inputs))
        if self._execute is None:
            return list(concrete(*inputs))[1:]
        return self._execute(concrete.name, len(self._types) + 1, inputs, cancellation)[1:]

    def _trace(self, stacked: Stacked, types: tuple[Any, ...]) -> Any:
        """Return the loop as a concrete function."""
        resource = self._tf.resource

        def steps(*inputs: Any) -> list[Any]:
            number, results = run_steps(self._step, self._types, inputs, stacked)
            return [number, *results]

        specs = [self._tf.TensorSpec([] if one == resource else None, one) for one in types]
        with self._tf.init_scope():
            return self._tf.function(steps, autograph=False).get_concrete_function(*specs)
