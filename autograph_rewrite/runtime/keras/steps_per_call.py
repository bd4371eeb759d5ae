"""Several steps in one call of a model's training function (`steps_per_run`, and Keras' `steps_per_execution`).

Drawn      an iterator of dense batches: the loop in the graph draws them, and ends where the data do
stacked    other batches: those that follow each other with one shape become rows

[32, 8] [32, 8] [32, 8] [7, 8]   ──►   [3, 32, 8]   [1, 7, 8]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from autograph_rewrite.requires import tensorflow


class Drawn:
    """Draws batches in a loop in the graph, and runs a step on each; returns the last step's results.

    The first step runs by itself: what it returns gives the loop its form.

    Args:
        step: runs one step on a batch, or adds it to a graph.
    """

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._tf = tensorflow()
        self._step = step
        self._results: Any = None
        self._loop = self._tf.function(self._several, autograph=False)

    def takes(self, iterator: Any) -> bool:
        """Return whether the graph can draw from an iterator: one of tf.data, of dense tensors alone."""
        tf = self._tf
        if not hasattr(iterator, "get_next_as_optional"):
            return False
        specs = tf.nest.flatten(iterator.element_spec)
        return all(isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in specs)

    def __call__(self, iterator: Any, count: int) -> Any:
        """Run up to `count` steps; None if there was no batch left."""
        tf = self._tf
        if self._results is None:
            data = next(iterator, None)
            if data is None:
                return None
            self._results, count = self._step(data), count - 1
            self._loop.get_concrete_function(iterator, tf.constant(count))  # what needs variables is made by now
        else:
            data = None
        done, results = self._loop(iterator, tf.constant(count))
        if not done and data is None:
            return None
        return tf.nest.pack_sequence_as(self._results, results) if done else self._results

    def _several(self, iterator: Any, count: Any) -> tuple[Any, list[Any]]:
        """Return how many steps were done, and the last one's results, flat."""
        tf = self._tf

        def drawn(number: Any) -> Any:
            none = tf.experimental.Optional.empty
            return tf.cond(number < count, iterator.get_next_as_optional, lambda: none(iterator.element_spec))

        def one_step(number: Any, batch: Any, *_: Any) -> list[Any]:
            results = [tf.identity(result) for result in tf.nest.flatten(self._step(batch.get_value()))]
            with tf.control_dependencies(results):
                number = number + 1
            return [number, drawn(number), *results]

        types = [tf.convert_to_tensor(result).dtype for result in tf.nest.flatten(self._results)]
        number, _, *results = tf.while_loop(
            lambda _, batch, *__: batch.has_value(),
            one_step,
            [tf.constant(0), drawn(tf.constant(0)), *(tf.zeros([], dtype) for dtype in types)],
            shape_invariants=[
                tf.TensorShape([]),
                tf.OptionalSpec(iterator.element_spec),
                *(tf.TensorShape(None) for _ in types),
            ],
            parallel_iterations=1,
        )
        return number, results


def taken(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield up to `count` batches."""
    for _ in range(count):
        try:
            yield next(iterator)
        except StopIteration:
            return


def stacked(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield the batches that follow each other with equal shapes as one, and whether that has rows for steps.

    Args:
        batches: as Keras nests them; one with sparse or ragged parts stays alone.
    """
    tf = tensorflow()

    def stack(*parts: Any) -> Any:
        return None if parts[0] is None else tf.stack(parts)

    for form, group in itertools.groupby(batches, _form):
        if form is None:
            yield from ((batch, False) for batch in group)
        else:
            yield tf.nest.map_structure(stack, *group), True


def _form(batch: Any) -> Hashable:
    """Return what batches have in common that can be stacked; None for one that cannot."""
    tf = tensorflow()
    leaves = tf.nest.flatten(batch)
    if not all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in leaves):
        return None
    return tuple((leaf.dtype, tuple(leaf.shape)) if leaf is not None else None for leaf in leaves)
