"""EnsureShape is divided like everything else, and fails where it would have failed on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.covering import covering

MODES = ["shared", "mirrored"]
Ensure = Callable[[tf.Tensor], tf.Tensor]


def make_step(ensure: Ensure) -> tuple[Any, tf.Variable]:
    w = tf.Variable(np.linspace(-1, 1, 36).reshape(6, 6), dtype=tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(ensure(x) @ w)))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step, w


def config(mode: str = "mirrored", **more: Any) -> dict[str, Any]:
    return {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": mode}, **more}


def batch(rows: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(rows).normal(size=(rows, 6)), tf.float32)


def in_a_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.ensure_shape(y * 0.5, [5, 6])), (0, x))[1]


def in_a_branch(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: tf.ensure_shape(2 * x, [5, 6]), lambda: x)


FITTING: dict[str, Ensure] = {
    "columns": lambda x: tf.ensure_shape(x, [None, 6]),
    "any": lambda x: tf.ensure_shape(x, [None, None]),
    "rows": lambda x: tf.ensure_shape(x, [5, 6]),
    "several rows for each example": lambda x: (
        tf.ensure_shape(tf.reshape(x, [-1, 2]), [15, 2])[:, :1] * tf.ones([1, 6])
    ),
    "rows behind columns": lambda x: tf.transpose(tf.ensure_shape(tf.transpose(x), [6, 5])),
    "a shape": lambda x: tf.reshape(x, tf.ensure_shape(tf.shape(x), [2])),
    "a sum over examples": lambda x: x + tf.ensure_shape(tf.reduce_sum(x, 0), [6]),
    "in a loop": in_a_loop,
    "in a branch": in_a_branch,
}


COUNTED = ("rows", "several rows for each example", "rows behind columns")
"""Behind these TensorFlow states sizes of the whole batch although it is open, which nobody can tell from others."""


@pytest.mark.parametrize(("name", "mode"), covering(list(FITTING), MODES))
def test_a_shape_that_fits_lets_the_step_be_divided(name: str, mode: str) -> None:
    (one, w), (step, v) = make_step(FITTING[name]), make_step(FITTING[name])
    two = ar.distribute(step, config(mode))
    for _ in range(2):
        np.testing.assert_allclose(two(batch(5)), one(batch(5)), rtol=1e-5)
    np.testing.assert_allclose(v, w, rtol=1e-5, atol=1e-6)
    (new,) = two.items
    products = [node.name for node in new.graph_def.node if node.op == "MatMul"]
    assert products
    assert all(name.startswith("replica_") for name in products)
    assert not new.report.gathers or name in COUNTED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*COUNTED, "in a loop"])
def test_another_number_of_rows_fails_as_on_one_device(name: str, mode: str) -> None:
    step, v = make_step(FITTING[name])
    two = ar.distribute(step, config(mode))
    two(batch(5))
    before = v.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError):
        make_step(FITTING[name])[0](batch(6))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        two(batch(6))
    assert "ensures that dimension" in str(error.value)
    assert "rows; over all replicas it has" in str(error.value)
    np.testing.assert_array_equal(v, before)


def test_two_blocks_that_together_have_the_wrong_size_do_not_pass_for_one_each() -> None:
    """Of a batch of ten, each replica has the five rows that are stated."""
    two = ar.distribute(make_step(FITTING["rows"])[0], config())
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[10\]"):
        two(batch(10))


def test_other_dimensions_are_looked_at_by_each_replica() -> None:
    columns = lambda x: tf.ensure_shape(tf.boolean_mask(x, x[0] > -9, axis=1), [None, 7])[:, :6]  # noqa: E731
    two = ar.distribute(make_step(columns)[0], config())
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not compatible with expected shape \[\?,7\]"):
        two(batch(5))


def test_a_batch_of_one_size_is_not_counted_again() -> None:
    w = tf.Variable(np.ones([6, 1]), dtype=tf.float32)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.ensure_shape(x, [5, 6]) @ w)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([5, 6], name="x"), batch_inputs={"x": 0})
    new = ar.rewrite(item, config("shared"))
    assert not [node.name for node in new.graph_def.node if node.op == "Assert"]
    assert ar.verify(item, config(), steps=2).ok


@pytest.mark.parametrize("form", ["unrolled", "loop"])
def test_micro_batches_look_at_their_own_columns(form: str) -> None:
    (one, _), (step, _) = make_step(FITTING["columns"]), make_step(FITTING["columns"])
    two = ar.distribute(step, config("shared", microbatches=2, accumulation={"form": form}))
    np.testing.assert_allclose(two(batch(5)), one(batch(5)), rtol=1e-5)


def test_micro_batches_count_the_whole_batch() -> None:
    (one, _), (step, _) = make_step(FITTING["rows"]), make_step(FITTING["rows"])
    two = ar.distribute(step, config("shared", microbatches=2))
    np.testing.assert_allclose(two(batch(5)), one(batch(5)), rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ensures that dimension 0"):
        two(batch(6))
