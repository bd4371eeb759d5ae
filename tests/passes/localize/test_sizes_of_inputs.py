"""What asks only how large an activation is does not wait for it: losses that leave classes out, masks of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.passes.localize import sizes_of_inputs

v1, layers = tf.compat.v1, keras.layers
LOOP = {"devices": ["CPU:0"], "microbatches": 2, "accumulation": {"form": "loop"}}
STAGES = {"devices": ["CPU:0", "CPU:1"], "pipeline": {"stages": 2, "microbatches": 2, "schedule": "gpipe"}}
WAYS = pytest.mark.parametrize("config", [LOOP, STAGES], ids=["loop", "stages"])


def left_out() -> Any:
    """A model of words, of which the loss leaves one out."""
    words = layers.Input((5,), dtype="int32")
    h = layers.Embedding(9, 4, dtype="float64")(words)
    h = layers.Dense(9, dtype="float64")(layers.Dense(4, dtype="float64")(h))
    return compiled(keras.Model(words, h), ignore_class=0)


def masked() -> Any:
    """A model whose mask is made of what two layers make, of one of which only the shape matters."""
    words = layers.Input((5,), dtype="int32")
    e = layers.Embedding(9, 4, mask_zero=True, dtype="float64")(words)
    h = layers.Concatenate(dtype="float64")([e, layers.Dense(4, dtype="float64")(e)])
    return compiled(keras.Model(words, layers.Dense(9, dtype="float64")(h)))


def compiled(model: Any, **loss: Any) -> Any:
    for i, one in enumerate(model.weights):
        one.assign(np.random.default_rng(i).normal(size=one.shape))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, **loss))
    return model


def fitted(make: Callable[[], Any], config: dict[str, Any] | None) -> list[np.ndarray]:
    dice = np.random.default_rng(0)
    words, wanted = dice.integers(0, 9, (6, 5)), dice.integers(0, 9, (6, 5))
    model = make() if config is None else ar.distribute(make(), config)
    model.fit(words, wanted, batch_size=6, epochs=3, shuffle=False, verbose=0)
    return [weight.numpy() for weight in model.weights]


@WAYS
@pytest.mark.parametrize("make", [left_out, masked])
def test_a_loss_that_counts_what_a_mask_keeps_trains_as_on_one_device(
    make: Callable[[], Any], config: dict[str, Any]
) -> None:
    for found, wanted in zip(fitted(make, config), fitted(make, None), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 if wanted.dtype == np.float32 else 1e-9)


@WAYS
def test_without_the_pass_it_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes_of_inputs, "take_sizes_from_inputs", lambda state: False)
    with pytest.raises(ar.PassError, match="of the whole batch"):
        fitted(left_out, config)


def test_stacks_of_a_loop_need_no_name_of_their_own_for_each_iteration() -> None:
    graph = tf.Graph()
    enabled = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with graph.as_default():
            x = v1.placeholder(tf.float64, [None, 4], "x")
            w = v1.get_variable("w", initializer=np.linspace(-1, 1, 16).reshape(4, 4), use_resource=True)
            _, h = v1.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))
            loss = tf.reduce_mean(h**2, name="loss")
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
            tf.group(v1.global_variables_initializer(), name="init")
    finally:
        if enabled:
            v1.enable_control_flow_v2()
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")
    for replicas in (1, 2):
        report = ar.verify(item, {**LOOP, "devices": [f"CPU:{i}" for i in range(replicas)]})
        assert report.ok, report


@WAYS
def test_sizes_come_from_an_input_of_the_same_batch(config: dict[str, Any]) -> None:
    """Two inputs of different sizes: the mask of one of them has as many rows as that one."""
    w = [tf.Variable(np.linspace(-1, 1, 12).reshape(3, 4)) for _ in range(2)]

    def step(v: tf.Variable) -> Callable[[Any, Any], Any]:
        def train(x: Any, other: Any) -> Any:
            with tf.GradientTape() as tape:
                h = x @ v
                kept = tf.reduce_sum(tf.reshape(tf.cast(tf.repeat(x[:, :1], 4, 1) > 0, tf.float64), tf.shape(h)))
                loss = tf.reduce_sum(tf.tanh(h) ** 2) / kept
            v.assign_sub(0.1 * tape.gradient(loss, v))
            return loss, tf.reduce_mean(other)

        return train

    x, other = np.random.default_rng(0).normal(size=(6, 3)), np.ones((8, 1))
    expected, found = tf.function(step(w[0]))(x, other), ar.distribute(step(w[1]), config)(x, other)
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12)
    np.testing.assert_allclose(w[1].numpy(), w[0].numpy(), rtol=0, atol=1e-12)


def rarity(x: Any) -> Any:
    """Weigh examples by how seldom they are."""
    _, which, count = tf.unique_with_counts(tf.cast(x[:, 0] > 0, tf.int32))
    return 1 / tf.cast(tf.gather(count, which), tf.float64)


def share(x: Any) -> Any:
    """Weigh examples by something of which nobody knows how many rows it has."""
    made = tf.numpy_function(lambda rows: np.abs(rows).sum(1) / np.abs(rows).sum(), [x], tf.float64)
    made.set_shape([None])
    return made


@WAYS
@pytest.mark.parametrize("weights", [rarity, share])
def test_weights_of_the_whole_batch_that_need_no_variable_come_first(
    weights: Callable[[Any], Any], config: dict[str, Any]
) -> None:
    w = [[tf.Variable(np.linspace(-1, 1, 12).reshape(3, 4)), tf.Variable(np.linspace(1, 2, 4))] for _ in range(2)]

    def step(v: list[tf.Variable]) -> Callable[[Any], Any]:
        def train(x: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = tf.linalg.matvec(tf.tanh(x @ v[0]), v[1]) ** 2
                loss = tf.reduce_sum(weights(x) * losses)
            for one, gradient in zip(v, tape.gradient(loss, v), strict=True):
                one.assign_sub(0.1 * gradient)
            return loss

        return train

    x = np.random.default_rng(0).normal(size=(6, 3))
    expected, found = tf.function(step(w[0]))(x), ar.distribute(step(w[1]), config)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for one, wanted in zip(w[1], w[0], strict=True):
        np.testing.assert_allclose(one.numpy(), wanted.numpy(), rtol=0, atol=1e-12)
