"""Graphs made for one batch size: what they state of whole batches has to hold for blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.passes.batch.localize_shapes import shapes_of_blocks
from tests.support.covering import covering
from tests.support.training import assert_trains_alike, make_item, placeholder, v1, variable

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 4, 3))
W = RNG.normal(size=(3, 3)) * 0.3


def recurrent(batch: int | None) -> dict[str, Any]:
    """Read from an unstacked array, write to another, stack it: what dynamic_rnn does."""
    x, w = placeholder("x", batch, 4, 3), variable("w", W)
    steps = tf.TensorArray(tf.float64, 4, element_shape=(batch, 3)).unstack(tf.transpose(x, [1, 0, 2]))
    written = tf.TensorArray(tf.float64, 4, element_shape=(batch, 3))

    def body(t: Any, state: Any, out: Any) -> tuple[Any, Any, Any]:
        state = tf.tanh(steps.read(t) + state @ w)
        return t + 1, state, out.write(t, state)

    zero = tf.zeros([batch or tf.shape(x)[0], 3], tf.float64)
    invariants = [tf.TensorShape(shape) for shape in ([], [batch, 3], None)]
    _, state, out = v1.while_loop(lambda t, *_: t < 4, body, [0, zero, written], shape_invariants=invariants)
    outputs = out.stack()
    return {"loss": tf.reduce_sum(outputs * outputs), "outputs": outputs, "state": state}


def unwritten(batch: int | None) -> dict[str, Any]:
    """Elements that are never written read as zeros, of the shape that the array states."""
    x, w = placeholder("x", batch, 4, 3), variable("w", W)
    array = tf.TensorArray(tf.float64, 3, element_shape=(batch, 3)).write(1, x[:, 0] @ w)
    outputs = array.stack()
    return {"loss": tf.reduce_sum(outputs * outputs), "outputs": outputs}


def dense_rows(batch: int | None) -> dict[str, Any]:
    """Two rows of an element belong to each example."""
    x, w = placeholder("x", batch, 4, 3), variable("w", W)
    rows = tf.reshape(x, [-1, 3]) @ w
    size = None if batch is None else 4 * batch
    array = tf.TensorArray(tf.float64, 2, element_shape=(size, 3)).write(0, rows).write(1, rows * rows)
    outputs = array.stack()
    return {"loss": tf.reduce_sum(outputs * outputs), "outputs": outputs}


@pytest.mark.parametrize(
    ("replicas", "batch", "build", "version"), covering([2, 3], [6, 7], [recurrent, unwritten, dense_rows], [1, 2])
)
def test_a_tensor_array_of_static_batches_holds_blocks(
    build: Callable[[int | None], dict[str, Any]], batch: int, replicas: int, version: int
) -> None:
    item = make_item(lambda: build(batch), batch_inputs={"x": 0}, version=version)
    assert_trains_alike(item, [{"x": X[:batch]}] * 2, replicas=replicas)


@pytest.mark.parametrize("build", [recurrent, dense_rows])
def test_a_tensor_array_of_any_batch_holds_blocks(build: Callable[[int | None], dict[str, Any]]) -> None:
    item = make_item(lambda: build(None), version=1)
    assert_trains_alike(item, [{"x": X[:n]} for n in (6, 7, 1)])


def test_blocks_have_their_part_of_a_stated_size() -> None:
    assert shapes_of_blocks((7, 3), 0, 7, 2) == [(4, 3), (3, 3)]
    assert shapes_of_blocks((3, 12), 1, 6, 3) == [(3, 4)] * 3
    assert shapes_of_blocks((7, 3), 0, None, 2) == [(None, 3)] * 2
    assert shapes_of_blocks((8, 3), 0, 6, 2) == [(None, 3)] * 2


@pytest.mark.parametrize("batch", [6, 7, None])
def test_the_elements_of_an_array_are_put_end_to_end_in_the_order_of_the_whole_batch(batch: int | None) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", batch, 4, 3), variable("w", W)
        array = tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, x[:, 0] @ w).write(1, x[:, 1] @ w)
        rows = array.concat()
        return {"loss": tf.reduce_sum(rows[1:] * rows[:-1]), "rows": rows}

    item = make_item(forward, batch_inputs={"x": 0}, version=1)
    assert_trains_alike(item, [{"x": X[: batch or 5]}] * 2)
