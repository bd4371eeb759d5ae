"""The batch split: the first B mod N blocks hold one example more, in Python, in graphs and in tf.data alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

DIGEST = 2
"""How many numbers a process sends about what it was given, beside the size of its part."""


def bounds(batch: int, parts: int) -> list[int]:
    """Return the `parts + 1` limits of the blocks of a batch."""
    each, more = divmod(batch, parts)
    return [block_begin(r, each, more) for r in range(parts + 1)]


def block_begin(index: Any, each: Any, more: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
    """Return where a block begins: numbers, or tensors of tf.data with TensorFlow's minimum.

    Args:
        index: of the block; the number of blocks gives the end of the last.
        each: how many examples every block holds.
        more: how many of the first blocks hold one example more.
        minimum: of two numbers.
    """
    return index * each + minimum(index, more)


def limits(batch: int, processes: int, each: int) -> list[int]:
    """Return the limits of the blocks of all replicas: the batch is divided among processes, then among replicas.

    Args:
        batch: examples of the global batch.
        processes: how many share it.
        each: replicas per process.
    """
    parts = pairwise(bounds(batch, processes))
    sizes = [b - a for first, last in parts for a, b in pairwise(bounds(last - first, each))]
    return [0, *accumulate(sizes)]
