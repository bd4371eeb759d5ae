"""What is gathered anew for the backward pass is what was read before the update."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar

BOTH = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "FSDP", "variables": "mirrored"}}
SIZE = 6


def test_what_was_read_before_an_update_under_a_condition_is_not_gathered_after_it() -> None:
    w = tf.Variable(np.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            before = w.value()
            h = tf.tanh(x @ before)
            loss = tf.reduce_sum(h)
        slope = tape.gradient(loss, w)
        tf.cond(loss > -1e9, lambda: w.assign_sub(slope), lambda: w.read_value())
        return tf.reduce_sum((h @ w.read_value()) @ before)

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, SIZE], tf.float64))
    assert ar.rewrite(item, BOTH).variables["w"].shards is not None
    report = ar.verify(item, BOTH)
    assert report.ok, report
