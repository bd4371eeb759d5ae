"""Micro-batches and stages in function and Keras mode, and of an item that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.staged import MODELS, assert_alike, feed, staged_item, train, values

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(22, 6)), RNG.normal(size=(22, 6))
HOW: dict[str, dict[str, Any]] = {
    "copies": {"microbatches": 3},
    "loop": {"microbatches": 3, "accumulation": {"form": "loop", "layout": "interleaved"}},
    "stages": {"pipeline": {"stages": 2, "microbatches": 4}},
    "stages in a loop": {"pipeline": {"stages": 2, "microbatches": 4, "form": "loop"}},
}


def made() -> tuple[list[Any], Any]:
    """Return variables, and a step that trains them and returns what it predicted."""
    weights = [tf.Variable(values(6, 6, seed=i), name=f"w{i}") for i in range(4)]

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean((h - y) ** 2)
        for w, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * slope)
        return {"loss": loss, "prediction": h}

    return weights, step


@pytest.mark.parametrize("how", HOW)
def test_a_function_trains_its_variables_alike(how: str) -> None:
    expected, single = made()
    weights, step = made()
    distributed = ar.distribute(step, {"devices": ["CPU:0"], **HOW[how]})
    for rows in (slice(0, 8), slice(8, 15)):
        x, y = tf.constant(X[rows]), tf.constant(Y[rows])
        a, b = distributed(x, y), tf.function(single)(x, y)
        np.testing.assert_allclose(a["prediction"], b["prediction"], 1e-9, 1e-12)
        np.testing.assert_allclose(a["loss"], b["loss"], 1e-9)
    for w, v in zip(weights, expected, strict=True):
        np.testing.assert_allclose(w.numpy(), v.numpy(), 1e-9, 1e-12)


def model() -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6, activation="tanh", dtype="float64") for _ in range(3)]
    made = keras.Sequential([keras.Input((6,), dtype="float64"), *layers])
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


@pytest.mark.parametrize("how", HOW)
def test_a_model_is_fitted_evaluated_and_asked_alike(how: str) -> None:
    single, distributed = model(), ar.distribute(model(), {"devices": ["CPU:0"], **HOW[how]})
    histories = [
        one.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history for one in (single, distributed)
    ]
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], 1e-6)
    for a, b in zip(distributed.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-9)
    np.testing.assert_allclose(distributed.predict(X, verbose=0), single.predict(X, verbose=0), 1e-6)
    np.testing.assert_allclose(distributed.evaluate(X, Y, verbose=0), single.evaluate(X, Y, verbose=0), 1e-6)


def test_a_saved_pipeline_runs_on_as_many_devices_as_it_names(tmp_path: Path) -> None:
    item, cuts = staged_item(MODELS["mlp"])
    feeds = [feed(item, step) for step in range(2)]
    pipeline = {"stages": 4, "microbatches": 2, "boundaries": cuts}
    ar.rewrite(item, {"devices": ["CPU:0"], "pipeline": pipeline}).save(tmp_path / "new.ar")
    assert_alike(train(ar.GraphItem.load(tmp_path / "new.ar"), feeds), train(item, feeds))


@pytest.mark.parametrize("how", [{"microbatches": 2}, {"pipeline": {"stages": 2, "microbatches": 2}}])
def test_updates_in_a_branch_are_made_although_nothing_but_the_step_is_fetched(how: dict[str, Any]) -> None:
    """The step waits for the end of the branch, which computes nothing itself, but waits for what was done in it."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float64, (None, 3), name="x")
        weights = [
            tf.compat.v1.get_variable(name, initializer=np.eye(3) + 0.1, use_resource=True) for name in ("v", "w")
        ]
        loss = tf.identity(tf.reduce_mean(tf.tanh(tf.tanh(x @ weights[0]) @ weights[1]) ** 2), name="loss")
        slopes = tf.compat.v1.gradients(loss, weights)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(slope)) for slope in slopes])

        def update() -> Any:
            return tf.group([w.assign_sub(slope) for w, slope in zip(weights, slopes, strict=True)])

        done = tf.cond(finite, update, tf.no_op)
        with tf.control_dependencies([done]):
            behind = tf.no_op(name="behind")
        with tf.control_dependencies([behind]):
            tf.no_op(name="train")
        tf.compat.v1.global_variables_initializer()
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")
    feed = {"x": np.random.default_rng(0).normal(size=(5, 3))}
    found = []
    for each in (item, ar.rewrite(item, {"devices": ["CPU:0"], **how})):
        with each.session() as session:
            session.run("init")
            session.run("train", feed)
            found.append(session.read_variable("w"))
    assert np.abs(found[0] - np.eye(3) - 0.1).max() > 1e-3
    np.testing.assert_allclose(found[1], found[0], 1e-9, 1e-12)
