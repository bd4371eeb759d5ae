"""Split a batch into N blocks: the first B mod N hold one example more, in Python, in graphs and in tf.data alike."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

_IN_PYTHON: dict[str, Callable[[Any, Any], Any]] = {"Mul": operator.mul, "Minimum": min, "AddV2": operator.add}
DIGEST = 2
"""How many numbers a process sends about its part of the batch, in addition to its size."""


def bounds(batch: int, parts: int) -> list[int]:
    """Return the `parts + 1` limits of the blocks of a batch."""
    each, more = divmod(batch, parts)
    return [block_begin(r, each, more) for r in range(parts + 1)]


def block_begin(
    index: Any, each: Any, more: Any, do: Callable[[str, Any, Any], Any] = lambda op, a, b: _IN_PYTHON[op](a, b)
) -> Any:
    """Return the first example of a block, as a number, a tensor of tf.data, or a value of a graph.

    Args:
        index: of the block; the number of blocks gives the end of the last.
        each: how many examples every block holds.
        more: how many of the first blocks hold one example more; or a function that makes that number when needed.
        do: computes a TensorFlow op; by default, in Python.
    """
    whole = do("Mul", index, each)
    return do("AddV2", whole, do("Minimum", index, more() if callable(more) else more))


def limits(batch: int, processes: int, each: int) -> list[int]:
    """Return the limits of the blocks of all replicas: the batch is divided among processes, then among replicas.

    Args:
        batch: examples of the global batch.
        each: replicas per process.
    """
    parts = pairwise(bounds(batch, processes))
    sizes = [b - a for first, last in parts for a, b in pairwise(bounds(last - first, each))]
    return [0, *accumulate(sizes)]
