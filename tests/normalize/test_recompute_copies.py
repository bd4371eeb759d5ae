"""What `tf.recompute_grad` computes twice is a segment: its copies come back where no optimizer merges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.load.marks import SEGMENT_ATTR
from autograph_rewrite.normalize import normalize
from autograph_rewrite.normalize.normalize import normalise
from tests.passes.rematerialize.test_rematerialize import LOOP, MICRO, ONE, SMALL, TWO, assert_same
from tests.support.recomputed import executed
from tests.support.training import make_item, placeholder, v1, variable

Forward = Callable[[], Mapping[str, Any]]


def layers(count: int = 3) -> Forward:
    """Return segments that are given the values of their weights, so that their copies read what they read."""

    def forward() -> Mapping[str, Any]:
        h, y = placeholder("x", None, 4), placeholder("y", None, 4)
        for i in range(count):
            a, b = (tf.identity(variable(f"{n}{i}", np.eye(4) * 0.6 + 0.1)) for n in "ab")
            h = tf.recompute_grad(lambda h, a, b: tf.tanh(tf.tanh(h @ a) @ b))(h, a, b)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    return forward


def test_tensorflow_no_longer_merges_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(layers())
    assert executed(ar.rewrite(item, ONE), SMALL[0])["Tanh"] == 12
    assert executed(ar.rewrite(item, {**ONE, "remat": {"policy": "none"}}), SMALL[0])["Tanh"] == 6
    monkeypatch.setattr(normalize, "merge_copies", lambda *_: 0)
    assert executed(ar.rewrite(item, ONE), SMALL[0])["Tanh"] == 6


STAGES = {**ONE, "pipeline": {"stages": 2, "microbatches": 2, "assign": "auto"}}


@pytest.mark.parametrize("config", [ONE, TWO, MICRO, LOOP, STAGES], ids=["one", "two", "micro", "loop", "stages"])
def test_each_replica_micro_batch_and_stage_has_them_behind_their_gradients(config: Mapping[str, Any]) -> None:
    item = make_item(layers())
    new = ar.rewrite(item, config)
    assert len(new.report.recomputed.segments) == 3
    copies = [node for node in new.graph if "remat/" in node.name and node.op == "Tanh"]
    each = 2 if config in (TWO, STAGES) else 3 if config is MICRO else 1
    assert len(copies) in ((5 * each, 6 * each) if config is STAGES else (6 * each,))
    for node in copies:
        assert any("gradients" in one.name for one in ancestors([node]))
    given = [{key: value[:4] for key, value in SMALL[0].items()}] if config is STAGES else SMALL
    assert_same(item, new, given)


def test_a_configuration_decides_in_their_place() -> None:
    item = make_item(layers(6))
    new = ar.rewrite(item, {**ONE, "remat": {"policy": "sqrt"}})
    assert 0 < len(new.report.recomputed.segments) < 6
    assert_same(item, new, SMALL)


def segments(item: ar.GraphItem) -> dict[str, set[str]]:
    """Return the ops of each segment."""
    found: dict[str, set[str]] = {}
    for node in normalise(item).graph:
        if SEGMENT_ATTR in node.attrs:
            found.setdefault(node.attr(SEGMENT_ATTR), set()).add(node.op)
    return found


def test_of_nested_segments_the_outermost_counts() -> None:
    def forward() -> Mapping[str, Any]:
        h, y = placeholder("x", None, 4), placeholder("y", None, 4)
        w = tf.identity(variable("w", np.eye(4) * 0.6 + 0.1))
        inner = tf.recompute_grad(lambda h, w: tf.tanh(h @ w))
        outer = tf.recompute_grad(lambda h, w: tf.sigmoid(inner(tf.sin(h), w)))
        h = outer(outer(h, w), w)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    item = make_item(forward)
    assert list(segments(item).values()) == [{"Sin", "MatMul", "Tanh", "Sigmoid"}] * 2
    new = ar.rewrite(item, ONE)
    assert_same(item, new, SMALL)
    assert len(new.report.recomputed.segments) == 2


def test_several_inputs_outputs_and_integers() -> None:
    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, 4), placeholder("y", None, 4)
        w = tf.identity(variable("w", np.eye(4) * 0.6 + 0.1))

        def segment(h: Any, g: Any, k: Any, w: Any) -> Any:
            z = tf.tanh(h @ w)
            return z * tf.cast(k, z.dtype), tf.sigmoid(g + z)

        h, g = tf.recompute_grad(segment)(x, tf.sin(x), tf.constant([1, 2, 3, 4]), w)
        h, g = tf.recompute_grad(segment)(h, g, tf.constant([4, 3, 2, 1]), w)
        return {"loss": tf.reduce_mean((h + g - y) ** 2)}

    item = make_item(forward)
    assert all({"Tanh", "MatMul", "Sigmoid", "Mul"} <= ops for ops in segments(item).values())
    for config in (ONE, TWO):
        new = ar.rewrite(item, config)
        assert len(new.report.recomputed.segments) == 2
        assert_same(item, new, SMALL)


def test_two_gradients_through_one_segment() -> None:
    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, 4), placeholder("y", None, 4)
        w = tf.identity(variable("w", np.eye(4) * 0.6 + 0.1))
        h = tf.recompute_grad(lambda h, w: tf.tanh(tf.tanh(h @ w) @ w))(x, w)
        slope = v1.gradients(tf.reduce_sum(h**2), w)[0]
        return {"loss": tf.reduce_mean((h - y) ** 2) + 0.1 * tf.reduce_sum(tf.stop_gradient(slope) * w)}

    item = make_item(forward)
    new = ar.rewrite(item, ONE)
    assert len(new.report.recomputed.segments) == 1
    assert_same(item, new, SMALL)


class Moving:
    """A segment that draws and writes: TensorFlow's copy does so once more."""

    def __init__(self) -> None:
        self.weights = [tf.Variable(np.eye(4) * 0.6 + 0.1 * i) for i in range(2)]
        self.moving = tf.Variable(np.zeros(4), trainable=False)
        self.segment = tf.recompute_grad(self.inside)

    def inside(self, h: Any, w: Any) -> Any:
        z = tf.tanh(h @ w)
        self.moving.assign_add(tf.reduce_mean(z, 0))
        return tf.sigmoid(z * self.moving)

    def step(self, x: Any) -> Any:
        """Return the loss before the update."""
        values = [tf.identity(w) for w in self.weights]
        with tf.GradientTape() as tape:
            tape.watch(values)
            h = x
            for value in values:
                h = self.segment(h, value)
            loss = tf.reduce_mean(h**2)
        for w, slope in zip(self.weights, tape.gradient(loss, values), strict=True):
            w.assign_sub(0.1 * slope)
        return loss


def test_what_is_written_is_written_twice_and_what_reads_it_reads_what_it_read() -> None:
    one, other = Moving(), Moving()
    x = tf.constant(SMALL[0]["x"])
    new = ar.distribute(other.step, {"devices": ["CPU:0"]})
    for _ in range(2):
        assert float(new(x)) == pytest.approx(float(tf.function(one.step)(x)), rel=1e-12)
    for a, b in zip((*one.weights, one.moving), (*other.weights, other.moving), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), 1e-12)
    flat = normalise(ar.GraphItem.from_function(Moving().step, tf.TensorSpec([None, 4], tf.float64)))
    assert {node.op for node in flat.graph if SEGMENT_ATTR in node.attrs} == {"MatMul", "Tanh", "Mean"}


def test_what_a_loop_in_a_segment_computes_is_computed_again_as_it_was() -> None:
    def forward() -> Mapping[str, Any]:
        h, y = placeholder("x", None, 4), placeholder("y", None, 4)
        w = tf.identity(variable("w", np.eye(4) * 0.6 + 0.1))

        def segment(h: Any, w: Any) -> Any:
            z = tf.tanh(h @ w)
            return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, tf.tanh(a @ w)), (0, z))[1]

        h = tf.recompute_grad(segment)(h, w)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    item = make_item(forward)
    assert_same(item, ar.rewrite(item, ONE), SMALL)


class Block(keras.layers.Layer):  # type: ignore[misc]
    """A layer without the argument `training`, which Keras cannot hand to tf.recompute_grad."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(keras.ops.tanh(x @ self.kernel) @ self.kernel)


def test_layers_of_keras_in_a_remat_scope() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        with keras.RematScope(mode="full"):
            layers = [Block(dtype="float64") for _ in range(4)]
        model = keras.Sequential(layers)
        model.build((None, 4))
        model.compile("sgd", "mse")
        return model

    x, y = (np.random.default_rng(i).normal(size=(8, 4)) for i in range(2))
    plain, model = build(), build()
    plain.fit(x, y, batch_size=8, epochs=2, verbose=0)
    ar.distribute(model, {"devices": ["CPU:0"]})
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), 1e-12)
    assert len(model.train_function.items[0].report.recomputed.segments) == 4
