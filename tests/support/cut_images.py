"""A small CNN whose images are cut along rows or columns, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

SHAPES = ((3, 3, 3, 4), (3, 3, 4, 4), (3, 3, 4, 6), (1, 1, 6, 4), (3, 3, 4, 4))
SPECS = (tf.TensorSpec([None, 16, 16, 3], tf.float64), tf.TensorSpec([None, 3], tf.float64))
STRIDES = (1, 2, 1, 1, 2)


def config(
    model: int, data: int = 1, split: Sequence[int] = (), match: str = "x", variables: str = "shared"
) -> dict[str, Any]:
    """Return a configuration that cuts the images."""
    return {
        "devices": [f"CPU:{i}" for i in range(model * data)],
        "mesh": {"data": data, "model": model},
        "strategy": {"name": "AllReduce", "variables": variables},
        "sharding": [{"match": match, "split": list(split) or [1, model, 1, 1]}],
    }


def variables() -> dict[str, tf.Variable]:
    """Return filters of five layers, and a matrix behind them."""
    rng = np.random.default_rng(0)
    made = {f"f{i}": rng.normal(size=shape) * 0.3 for i, shape in enumerate(SHAPES)}
    made["head"] = rng.normal(size=(64, 3))
    return {name: tf.Variable(value, name=name, dtype=tf.float64) for name, value in made.items()}


def step_of(v: Mapping[str, tf.Variable]) -> Callable[[Any, Any], Any]:
    """Return a training step."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i, stride in enumerate(STRIDES):
                h = tf.nn.relu(tf.nn.conv2d(h, v[f"f{i}"], stride, "SAME"))
            loss = tf.reduce_mean((tf.reshape(h, [-1, 64]) @ v["head"] - y) ** 2)
        for one, gradient in zip(v.values(), tape.gradient(loss, list(v.values())), strict=True):
            one.assign_sub(0.01 * gradient)
        return loss

    return step


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return images and what is wanted of them."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(4, 16, 16, 3)), rng.normal(size=(4, 3))
