"""What goes around a loop: states that grow, arrays whose gradients have open sizes, functions called in conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.training import assert_trains_alike, make_item, placeholder, variable

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4, 3))
W = RNG.normal(size=(3, 3)) / 2


def repeated(body: Callable[[Any], Any], state: Any, shape: tuple[int | None, ...]) -> Any:
    shapes = (tf.TensorShape([]), tf.TensorShape(shape))
    return tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, body(a)), (0, state), shape_invariants=shapes)[1]


def recurrent(x: Any, w: Any) -> Any:
    steps = tf.shape(x)[1]

    def body(i: Any, state: Any, out: Any) -> Any:
        state = tf.tanh(x[:, i] @ w + state)
        return i + 1, state, out.write(i, state)

    start = (0, tf.zeros_like(x[:, 0]), tf.TensorArray(tf.float64, steps))
    return tf.transpose(tf.while_loop(lambda i, *_: i < steps, body, start)[2].stack(), [1, 0, 2])


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "grows along the batch": lambda x, w: repeated(lambda a: tf.concat([a, x[:, 0] @ w], 0), x[:, 0], (None, 3)),
    "every row twice": lambda x, w: repeated(lambda a: tf.repeat(tf.tanh(a @ w), 2, axis=0), x[:, 0], (None, 3)),
    "grows along time": lambda x, w: repeated(lambda a: tf.concat([a, a[:, -1:] @ w], 1), x, (None, None, 3)),
    "a row becomes the batch": lambda x, w: repeated(lambda a: a @ w + x[:, 0], tf.ones([1, 3], "double"), (None, 3)),
    "the batch becomes a row": lambda x, w: x[:, 1] + repeated(lambda a: (a @ w)[:1], x[:, 0], (None, 3)),
    "steps before a dense layer": lambda x, w: tf.tensordot(recurrent(x, w), w, 1),
    "steps before a mask": lambda x, w: tf.boolean_mask(recurrent(x, w), x[:, :, 0] > 0),
}


@pytest.mark.parametrize(("version", "shape"), [(1, (None, None)), (2, (None, None)), (2, (5, None)), (2, (5, 4))])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_goes_around_a_loop_gives_what_one_device_gives(
    loop: str, version: int, shape: tuple[int | None, ...]
) -> None:
    def forward() -> dict[str, Any]:
        y = LOOPS[loop](placeholder("x", *shape, 3), variable("w", W))
        return {"loss": tf.reduce_mean(y * y), "y": y}

    assert_trains_alike(make_item(forward, version=version, batch_inputs={"x:0": 0}), [{"x": X}])


def test_branches_in_a_loop_that_exchange_rows_do_not_wait_for_each_other() -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, None, 3), variable("w", W)

        def body(i: Any, rows: Any) -> Any:
            made = tf.cond(i < 1, lambda: (x[:, 0] @ w)[:2], lambda: x[:, 1] @ w)
            return i + 1, rows.write(i, made)

        rows = tf.TensorArray(tf.float64, 3, infer_shape=False, element_shape=[None, 3])
        y = tf.while_loop(lambda i, _: i < 3, body, (0, rows))[1].concat()
        return {"loss": tf.reduce_mean(y * y), "y": y}

    assert_trains_alike(make_item(forward), [{"x": X}])


def test_what_differs_in_size_makes_its_list_whole() -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 3), variable("w", W)
        rows = tf.TensorArray(tf.float64, 2, infer_shape=False, element_shape=[None, 3])
        y = rows.write(0, x @ w).write(1, (x @ w)[:1]).concat()
        return {"loss": tf.reduce_mean(y * y), "y": y}

    assert_trains_alike(make_item(forward), [{"x": X[:, 0]}])


def test_the_gradient_of_a_gradient_of_branches_that_a_tape_took_is_distributed() -> None:
    w = tf.Variable(W)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ w), lambda: x @ w)
                z = tf.reduce_mean(tf.square(y))
            loss = tf.reduce_mean(tf.reduce_sum(inner.gradient(z, x) ** 2, 1)) + z
        w.assign_sub(0.1 * outer.gradient(loss, w))
        return loss

    expected = [step(tf.constant(X[:, 0])).numpy() for _ in range(2)]
    for mode in ("shared", "mirrored"):
        w.assign(W)
        config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": mode}}
        got = ar.distribute(step, config, tf.TensorSpec([None, 3], tf.float64))
        np.testing.assert_allclose([got(tf.constant(X[:, 0])).numpy() for _ in range(2)], expected, 1e-9)


def test_a_function_called_by_name_in_the_condition_of_a_loop_is_inlined() -> None:
    def forward() -> dict[str, Any]:
        x = placeholder("x", None, 4, 3, dtype=tf.float32)
        logits = tf.transpose(x @ variable("w", W.astype("float32")), [1, 0, 2])
        count = tf.shape(x)[0]
        labels, lengths, steps = tf.tile([[1, 2]], [count, 1]), tf.fill([count], 2), tf.fill([count], 4)
        return {"loss": tf.reduce_mean(tf.nn.ctc_loss(labels, logits, lengths, steps, blank_index=0))}

    assert_trains_alike(make_item(forward), [{"x": X}], tolerance=1e-5)
