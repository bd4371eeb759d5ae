"""Segments of `tf.recompute_grad` wait for their gradients by edges: micro-batches, loops and stages keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.normalize import normalize
from autograph_rewrite.normalize.normalize import normalise
from tests.support.training import make_item, placeholder, variable

X = np.random.default_rng(0).normal(size=(8, 4))
LAYERS = 4
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"devices": ["CPU:0", "CPU:1"]},
    "micro-batches": {"devices": ["CPU:0"], "microbatches": 4},
    "loop": {"devices": ["CPU:0"], "microbatches": 4, "accumulation": {"form": "loop"}},
    "stages": {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 4}},
}


class Model:
    """Layers that are computed twice, and a step of gradient descent."""

    def __init__(self) -> None:
        self.weights = [tf.Variable(np.random.default_rng(i).normal(size=(4, 4)) / 2) for i in range(LAYERS)]
        self.segments = [tf.recompute_grad(lambda x, w=w: tf.tanh(tf.tanh(x @ w) @ w)) for w in self.weights]

    def step(self, x: Any) -> Any:
        """Return the loss before the update."""
        with tf.GradientTape() as tape:
            h = x
            for segment in self.segments:
                h = segment(h)
            loss = tf.reduce_mean(tf.square(h))
        for w, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    def train(self, step: Any) -> list[Any]:
        """Return the losses of two calls, and the weights after them."""
        losses = [step(tf.constant(X)).numpy() for _ in range(2)]
        return [*losses, *(w.numpy() for w in self.weights)]


SPEC = tf.TensorSpec([None, 4], tf.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_recomputed_segments_trains_as_on_one_device(name: str) -> None:
    one, other = Model(), Model()
    expected = one.train(tf.function(one.step))
    got = other.train(ar.distribute(other.step, dict(CONFIGS[name]), SPEC))
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(value, wanted, 1e-12, err_msg=str(index))


def test_the_segments_wait_for_their_gradients_by_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalize, "merge_copies", lambda *_: 0)
    flat = normalise(ar.GraphItem.from_function(Model().step, SPEC)).graph
    count = Counter(node.op for node in flat)
    assert (count["Tanh"], count["AddV2"]) == (2 * 2 * LAYERS, 0)
    assert len([node for node in flat if node.op == "Identity" and node.controls]) >= LAYERS


def test_a_choice_that_is_no_barrier_stays() -> None:
    def forward() -> Mapping[str, Any]:
        x, w = placeholder("x", None, 4), variable("w", np.eye(4))
        y = x @ w
        first = tf.cast(tf.reduce_max(tf.reshape(y, [-1])[:1]), tf.bool)
        return {"loss": tf.reduce_sum(y + tf.where(first == tf.logical_not(first), tf.constant(0.0, y.dtype), 1.0))}

    flat = normalise(make_item(forward)).graph
    assert any(node.op == "SelectV2" and node.output().uses for node in flat)
