"""One row for all: what has a constant number of rows is no block of the batch, and stretches where it meets one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import assert_trains_alike, make_item, placeholder, variable

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 4))
W = RNG.normal(size=(4, 3))
TABLE = RNG.normal(size=(5, 3))

ROWS: dict[str, Callable[[Any], Any]] = {
    "the last of what is reversed": lambda d: d[::-1] + d[::-1][-1:],
    "the first": lambda d: d[:1] * d,
    "one by number": lambda d: d - d[-1],
    "two, averaged": lambda d: d + tf.reduce_mean(d[-2:], 0, keepdims=True),
    "broadcast to the shape of the batch": lambda d: d + tf.broadcast_to(d[-1:], tf.shape(d)),
    "repeated for every example": lambda d: d + tf.tile(d[:1], [tf.shape(d)[0], 1]),
    "gathered by one index": lambda d: d + tf.gather(d, [tf.shape(d)[0] - 1]),
    "rolled": lambda d: d * tf.roll(d, 1, 0),
    "the largest of each column": lambda d: d + tf.transpose(tf.math.top_k(tf.transpose(d), 1)[0]),
    "chosen where nothing else is": lambda d: tf.where(d > 0, d, d[:1]),
    "of a branch": lambda d: d + tf.cond(tf.reduce_sum(d) > 0, lambda: d[:1], lambda: d[-1:] * 2),
    "of a branch, or all": lambda d: d + tf.cond(tf.reduce_sum(d) > 0, lambda: d[:1], lambda: d * 2),
    "of a reversed branch": lambda d: tf.reverse(d, [0]) * tf.cond(tf.reduce_sum(d) < 0, lambda: d[:1], lambda: d),
}


def forward(rows: Callable[[Any], Any], batch: int | None) -> dict[str, Any]:
    d = tf.tanh(placeholder("x", batch, 4) @ variable("w", W))
    y = rows(d)
    return {"loss": tf.reduce_mean(y * y), "y": y}


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_is_no_block(rows: str) -> None:
    item = make_item(lambda: forward(ROWS[rows], None))
    assert_trains_alike(item, [{"x": X}, {"x": X[:1]}], replicas=3)


@pytest.mark.parametrize("rows", ["the last of what is reversed", "broadcast to the shape of the batch"])
def test_a_row_is_no_block_of_a_static_batch(rows: str) -> None:
    item = make_item(lambda: forward(ROWS[rows], 7), batch_inputs={"x": 0})
    assert_trains_alike(item, [{"x": X}])


def test_a_batch_of_one_example_stretches_over_a_table() -> None:
    item = make_item(lambda: forward(lambda d: d + TABLE, None))
    assert_trains_alike(item, [{"x": X[:1]}, {"x": X[:5]}])
