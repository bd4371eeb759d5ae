"""Cut the value of a variable into the pieces that a graph has of it, and join them, with TensorFlow's ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograph_rewrite.requires import tensorflow
from autograph_rewrite.training_graph import Shards


def cut(shards: Shards, value: Any) -> list[Any]:
    """Return the pieces of a tensor.

    Args:
        value: the whole.
    """
    tf = tensorflow()

    def split(part: Any, sizes: tuple[int, ...], axis: int) -> Sequence[Any]:
        found: Sequence[Any] = tf.raw_ops.SplitV(
            value=part, size_splits=tf.constant(sizes, tf.int64), axis=axis, num_split=len(sizes)
        )
        return found

    return shards.cut(value, split)


def join(shards: Shards, pieces: Sequence[Any]) -> Any:
    """Return the whole of its pieces.

    Args:
        shards: how it is cut.
        pieces: tensors, in the order of its handles.
    """
    tf = tensorflow()
    return shards.join(pieces, lambda parts, axis: tf.raw_ops.ConcatV2(values=parts, axis=axis))
