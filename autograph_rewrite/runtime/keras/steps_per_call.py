"""Batches of an iterator, stacked for the steps of one call (`steps_per_run`, and Keras' `steps_per_execution`).

[32, 8] [32, 8] [32, 8] [7, 8]   ──►   [3, 32, 8]   [1, 7, 8]
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from autograph_rewrite.requires import tensorflow


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
