"""A custom training loop: the step is a plain function over tf.Variables, and `ar.distribute` is the only change."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce"}}
STEPS = int(os.environ.get("EXAMPLE_STEPS", "200"))

rng = np.random.default_rng(0)
w1 = tf.Variable(rng.normal(size=(2, 32)), dtype=tf.float32, name="w1")
b1 = tf.Variable(rng.normal(size=32), dtype=tf.float32, name="b1")
w2 = tf.Variable(rng.normal(size=(32, 1)) * 0.1, dtype=tf.float32, name="w2")
weights = [w1, b1, w2]
optimizer = keras.optimizers.AdamW(0.01)
optimizer.build(weights)


def train_step(x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        predictions = tf.tanh(x @ w1 + b1) @ w2
        loss = tf.reduce_mean(tf.square(predictions - y))
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)  # of the whole batch
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return {"loss": loss, "norm": norm}


def batch(size: int) -> tuple[Any, Any]:
    x = rng.uniform(-1, 1, (size, 2)).astype(np.float32)
    return x, np.prod(x, axis=1, keepdims=True)


def main() -> None:
    step = ar.distribute(train_step, CONFIG)
    for number in range(1, STEPS + 1):
        result = step(*batch(size=61))  # 31 examples for one replica, 30 for the other
        if number == 1 or number % max(STEPS // 5, 1) == 0:
            print(f"step {number:4}  loss {result['loss']:.5f}  gradient norm {result['norm']:.3f}")
    print(f"w1 is the user's own tf.Variable still, now of norm {tf.norm(w1):.3f}")


if __name__ == "__main__":
    main()
