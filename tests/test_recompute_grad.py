"""Segments of `tf.recompute_grad` wait for their gradients by edges: micro-batches, loops and stages keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.load.normal import normalise
from tests.training import make_item, placeholder, train, variable

X = np.random.default_rng(0).normal(size=(8, 4))
LAYERS = 4
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"devices": ["CPU:0", "CPU:1"]},
    "micro-batches": {"devices": ["CPU:0"], "microbatches": 4},
    "loop": {"devices": ["CPU:0"], "microbatches": 4, "accumulation": {"form": "loop"}},
    "stages": {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 4}},
}


def recomputed() -> Mapping[str, Any]:
    h = placeholder("x", None, 4)
    for i in range(LAYERS):
        w = variable(f"w{i}", np.random.default_rng(i).normal(size=(4, 4)) / 2)
        h = tf.recompute_grad(lambda x, w=w: tf.tanh(tf.tanh(x @ w) @ w))(h)
    return {"loss": tf.reduce_mean(tf.square(h))}


@pytest.fixture(scope="module")
def item() -> ar.GraphItem:
    return make_item(recomputed)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_recomputed_segments_trains_as_on_one_device(item: ar.GraphItem, name: str) -> None:
    expected = train(item, [{"x": X}] * 2)
    got = train(ar.rewrite(item, CONFIGS[name]), [{"x": X}] * 2)
    for variable_name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[variable_name], value, 1e-12, err_msg=variable_name)
    np.testing.assert_allclose(got.fetched[1]["loss"], expected.fetched[1]["loss"], 1e-12)


def test_the_segments_are_still_computed_twice_and_wait_for_their_gradients(item: ar.GraphItem) -> None:
    flat = normalise(item).graph
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
