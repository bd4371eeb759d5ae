"""Shards behind the user's tf.Variables: functions and Keras models train in shards, and see whole variables."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.matrix.run import compare, distributed, truth
from tests.zoo import KERAS_OPTIMIZERS, ZOO, Options

SIZES = (12, 7, 5)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 10))


def config(match: str, *, mode: str = "shared", replicas: int = 1, axis: int = 0, shards: int = 3) -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(replicas)]
    partition = [{"match": match, "partition": {"axis": axis, "shards": shards}}]
    return {"devices": devices, "strategy": {"variables": mode}, "variables": partition, "timeout_seconds": 20}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*(("function_sparse", one) for one in KERAS_OPTIMIZERS), ("custom_loop", "adam"), ("keras_two_inputs", "adagrad")],
)
def test_keras_optimizers_train_in_shards_as_on_whole_variables(name: str, optimizer: str):
    matches = {"custom_loop": "w1|w2|b1", "function_sparse": "table|kernel|bias"}
    settings = config(matches.get(name, ".*(embeddings|kernel)"), mode="mirrored", replicas=2)
    options = Options(optimizer=optimizer)
    trace, _ = distributed(ZOO[name].build(options), settings, SIZES)

    assert max(error for _, error in compare(trace, truth(name, options, SIZES), 1e-6)) < 1e-12


@pytest.mark.parametrize("optimizer", KERAS_OPTIMIZERS)
def test_the_slots_of_a_variable_are_cut_with_it(optimizer: str):
    built = ZOO["function_sparse"].build(optimizer=optimizer)
    item = ar.GraphItem.from_function(built.step, *built.specs, batch_inputs=dict(built.batch_inputs))
    new = ar.rewrite(item, config("table"))

    updated = {variable.handle for variable in item.variables.values() if variable.shape == (9, 5)}
    assert {item.variables[name].handle for name, v in new.variables.items() if v.shards is not None} == updated


class Model:
    def __init__(self) -> None:
        self.w = tf.Variable(np.linspace(-1, 1, 30).reshape(10, 3))
        self.m = tf.Variable(np.zeros((10, 3)), trainable=False)

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ self.w - 1.0))
        self.m.assign(0.9 * self.m + tape.gradient(loss, self.w))
        self.w.assign_sub(0.1 * self.m / tf.norm(self.m))
        return loss


@pytest.fixture
def pair() -> tuple[Model, Model]:
    return Model(), Model()


def assert_same(one: Model, many: Model) -> None:
    np.testing.assert_allclose(many.w.numpy(), one.w.numpy(), rtol=1e-12)
    np.testing.assert_allclose(many.m.numpy(), one.m.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("mode", "replicas"), [("shared", 2), ("mirrored", 2)])
def test_the_users_variables_stay_the_truth(mode: str, replicas: int, pair: tuple[Model, Model]):
    one, many = pair
    step = ar.distribute(many.step, config(".*", mode=mode, replicas=replicas, shards=4))
    for _ in range(2):
        np.testing.assert_allclose(step(X), one.step(X), rtol=1e-12)
    assert_same(one, many)
    for model in pair:  # somebody else writes one of them
        model.w.assign(model.w * 2.0)
    step(X), one.step(X)
    assert_same(one, many)


def test_a_step_inside_of_another_function_updates_the_users_variables(pair: tuple[Model, Model]):
    one, many = pair
    step = ar.distribute(many.step, config(".*", mode="mirrored", replicas=2), tf.TensorSpec([None, 10], tf.float64))

    @tf.function
    def twice(x: Any) -> Any:
        step(x)
        return step(x)

    first = twice(tf.constant(X))
    one.step(X)
    np.testing.assert_allclose(first, one.step(X), rtol=1e-12)
    assert_same(one, many)
    step(X), one.step(X)
    assert_same(one, many)


def test_a_step_that_fails_leaves_the_users_variables_readable(pair: tuple[Model, Model]):
    one, many = pair
    step = ar.distribute(many.step, config(".*"), tf.TensorSpec([None, None], tf.float64))
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones([4, 7], tf.float64))
    step(X), one.step(X)
    assert_same(one, many)


def checked(model: Model) -> Any:
    def step(x: Any) -> Any:
        loss = model.step(x)
        # Without it the assertion may fail before the updates, on one device, too.
        nothing = 0.0 * tf.reduce_sum(model.w + model.m)
        tf.debugging.assert_less(tf.reduce_max(x) + nothing, tf.constant(50.0, tf.float64))
        return loss

    return step


def test_what_a_step_has_updated_before_it_failed_stays_as_on_one_device(pair: tuple[Model, Model]):
    one, many = pair
    for step in (tf.function(checked(one)), ar.distribute(checked(many), config(".*", mode="mirrored", replicas=2))):
        for x in (X, 100.0 * X, X):
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                step(tf.constant(x))
    assert_same(one, many)
    assert np.abs(one.m).max() > 1.0  # the step that failed left its mark


@pytest.mark.parametrize("nested", [False, True])
def test_where_the_data_end_in_the_middle_of_a_run_the_steps_before_are_kept(nested: bool, pair: tuple[Model, Model]):
    one, many = pair
    settings = config(".*", mode="mirrored", replicas=2) | {"steps_per_run": 3}
    step = ar.distribute(lambda iterator: many.step(next(iterator)), settings)
    data = tf.data.Dataset.from_tensor_slices(np.concatenate([X, 2.0 * X, 3.0 * X, 4.0 * X, 5.0 * X])).batch(6)
    iterator, run = iter(data), tf.function(lambda iterator: step(iterator)) if nested else step
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while True:
            run(iterator)
    for x in data:
        one.step(x)
    assert_same(one, many)


def network() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    model.compile(optimizer=keras.optimizers.Lamb(0.01), loss="mse", metrics=["mae"])
    return model


def weights(model: Any) -> Sequence[Any]:
    return [np.asarray(v) for v in (*model.weights, *model.optimizer.variables)]


def test_fit_evaluate_and_saving_go_on_as_before(tmp_path: Path):
    x, y = RNG.normal(size=(32, 10)).astype("float32"), RNG.normal(size=(32, 3)).astype("float32")
    one, many = network(), ar.distribute(network(), config(".*kernel", mode="mirrored", replicas=2))
    for model in (one, many):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x[:8], y[:8]))
    for a, b in zip(weights(one), weights(many), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    many.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(weights(again), weights(many), strict=True):
        np.testing.assert_array_equal(b, a)
    # Half a batch on each replica rounds otherwise than a whole one, in the last place.
    np.testing.assert_allclose(again.predict(x, verbose=0), many.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    many.load_weights(tmp_path / "model.keras")
    np.testing.assert_allclose(many.evaluate(x, y, verbose=0), again.evaluate(x, y, verbose=0), rtol=1e-6)
