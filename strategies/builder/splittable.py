"""Into how many parts a variable can be split along an axis."""

from __future__ import annotations

from collections.abc import Callable

from autograph_rewrite.strategies.builder.choice import Parts, TrainedVariable
from autograph_rewrite.strategies.builder.shard_counts import MOST


def along(trained: TrainedVariable, axis: int, count: Callable[[int], int]) -> Parts | None:
    """Return the parts that `count` makes of an axis; None where the variable stays whole.

    It does where it is a scalar or too short, and where the number would be beyond all use.

    Args:
        trained: the variable.
        axis: of its shape.
        count: the number of shards for a size.
    """
    size = trained.shape[axis] if axis < len(trained.shape) else None
    if size is None:
        return None
    shards = count(size)
    return Parts(axis, shards) if 2 <= shards <= min(size, MOST) else None
