"""A training step that is small enough to be compared to the last bit, and how to distribute it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def config(mode: str, replicas: int = 2) -> dict[str, Any]:
    return {"devices": [f"CPU:{i}" for i in range(replicas)], "strategy": {"name": "AllReduce", "variables": mode}}


class Linear:
    """A linear regression with momentum by hand, in float64 so that replicas add no visible rounding."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w = tf.Variable(rng.normal(size=(4, 3)), name="w")
        self.velocity = tf.Variable(np.zeros((4, 3)), trainable=False, name="velocity")
        self.rate = tf.Variable(np.float64(0.1), trainable=False, name="rate")
        self.count = tf.Variable(0, trainable=False, name="count")

    @property
    def variables(self) -> list[Any]:
        return [self.w, self.velocity, self.rate, self.count]

    def step(self, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ self.w - y))
        self.velocity.assign(0.9 * self.velocity + tape.gradient(loss, self.w))
        self.w.assign_sub(self.rate * self.velocity)
        self.count.assign_add(1)
        return {"loss": loss, "prediction": x @ self.w}


def batch(size: int, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=(size, 4))), tf.constant(rng.normal(size=(size, 3)))


def assert_same_state(one: Linear, other: Linear) -> None:
    for a, b in zip(one.variables, other.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12, err_msg=a.name)
