"""Into how many parts a variable can be split along an axis."""

from __future__ import annotations

from collections.abc import Callable

from autograph_rewrite.strategies.builder.choice import Choice, Parts, TrainedVariable
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
    return None if size is None or why_whole(trained, axis, count) else Parts(axis, count(size))


def why_whole(trained: TrainedVariable, axis: int, count: Callable[[int], int]) -> str:
    """Return why a variable cannot be split along an axis; empty where it can.

    Args:
        trained: the variable.
        axis: of its shape.
        count: the number of shards for a size.
    """
    if axis >= len(trained.shape):
        return "it is a scalar" if not trained.shape else f"it has {len(trained.shape)} axes, so no axis {axis}"
    size = trained.shape[axis]
    if size is None:
        return f"the size of axis {axis} is not known"
    shards = count(size)
    if shards < 2:
        return f"axis {axis} has size {size}, too short to be split"
    if shards > min(size, MOST):
        return f"axis {axis} has size {size}, which makes {shards} shards; at most {min(size, MOST)} are made"
    return ""


def in_parts(
    trained: TrainedVariable, axis: int, count: Callable[[int], int], synchronizer: str = "all_reduce"
) -> Choice:
    """Return the choice that splits a variable along an axis, or leaves it whole and says why.

    Args:
        trained: the variable.
        axis: of its shape.
        count: the number of shards for a size.
        synchronizer: how its gradient is reduced.
    """
    return Choice(synchronizer, along(trained, axis, count), because=why_whole(trained, axis, count))
