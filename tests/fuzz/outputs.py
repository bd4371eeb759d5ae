"""What a step returns besides its loss: per example, counted over the batch, or about the variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.fuzz.net import D, Net

OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda h: h,
    "features": lambda h: tf.transpose(h),
    "chosen": lambda h: tf.argmax(h, -1),
    "row_norm": lambda h: tf.norm(h + 0.01, axis=1),
    "mean": lambda h: tf.reduce_mean(h),
    "column_mean": lambda h: tf.reduce_mean(h, 0),
    "column_std": lambda h: tf.math.reduce_std(h, 0),
    "largest": lambda h: tf.reduce_max(h),
    "positive": lambda h: tf.reduce_sum(tf.cast(h > 0, tf.int32)),
    "count": lambda h: tf.shape(h)[0],
    "size": lambda h: tf.cast(tf.size(h), D),
    "flat": lambda h: tf.reshape(h, [-1]),
    "sum": lambda h: tf.reduce_sum(h, 1, keepdims=True),
    "one_row": lambda h: h[0],
    "sorted": lambda h: tf.sort(h[:, 0]),
    "kept": lambda h: tf.boolean_mask(h, h[:, 0] > 0),
    "where": lambda h: tf.where(h > 0),
    "any": lambda h: tf.reduce_any(h > 1.0),
    "constant": lambda h: tf.constant(1.5, D),
}


def add_outputs(net: Net, h: Any) -> None:
    """Let the step return some of them."""
    for name in net.dice.sample(list(OUTPUTS), net.dice.choice([0, 0, 1, 2])):
        net.outputs[name] = OUTPUTS[name](h)
