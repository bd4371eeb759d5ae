"""In a loop of micro-batches each iteration takes its own sizes, where the unrolled form reads those of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.passes.micro_batches import loop

LOOP = {"microbatches": 2, "accumulation": {"form": "loop"}}
CONFIGS = {
    "one device": {"devices": ["CPU:0"], **LOOP},
    "shared": {"devices": ["CPU:0", "CPU:1"], **LOOP},
    "mirrored": {"devices": ["CPU:0", "CPU:1"], "strategy": {"variables": "mirrored"}, **LOOP},
}


def clipped(up: tf.Variable, w: tf.Variable) -> Callable[[Any, Any], Any]:
    """A step that clips the gradient of each example, which `vectorized_map` makes with sizes of activations."""

    def of_one(example: Any) -> Any:
        x, y = example
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.tanh(x[None] @ up) @ w - y) ** 2)
        return tape.gradient(loss, w)

    def train(x: Any, y: Any) -> Any:
        gradients = tf.vectorized_map(of_one, (x, y))
        norms = tf.sqrt(tf.reduce_sum(gradients**2, [1, 2]))
        w.assign_sub(0.1 * tf.reduce_mean(gradients / tf.maximum(norms, 1)[:, None, None], 0))
        return norms

    return train


def trained(config: dict[str, Any] | None) -> list[np.ndarray]:
    up, w = (tf.Variable(np.linspace(-1, 1, 4 * rows).reshape(rows, 4)) for rows in (3, 4))
    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(8, 3)), dice.normal(size=(8, 4))
    step = tf.function(clipped(up, w)) if config is None else ar.distribute(clipped(up, w), config)
    norms = [np.asarray(step(x, y)) for _ in range(3)]
    return [*norms, w.numpy()]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_each_example_are_clipped_as_on_one_device(name: str) -> None:
    for found, wanted in zip(trained(CONFIGS[name]), trained(None), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_with_the_sizes_of_the_first_the_loop_would_wait_for_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_take_own_sizes", lambda graph, kept: None)
    with pytest.raises(ar.PassError, match="waits for its end"):
        trained(CONFIGS["one device"])
