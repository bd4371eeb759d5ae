"""Ops that mix all examples of a batch give what they give on one device, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.training import assert_trains_alike, make_item, placeholder, variable

X = np.random.default_rng(0).normal(size=(6, 3))


@pytest.mark.parametrize("range_given", [False, True])
def test_quantisation_takes_its_range_from_the_whole_batch(range_given: bool) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 3), variable("w", np.array([[0.1], [0.2], [0.3]]))
        y = tf.quantization.quantize_and_dequantize_v2(x @ w, -0.3, 0.4, range_given=range_given)
        return {"loss": tf.reduce_sum(y * y), "y": y}

    assert_trains_alike(make_item(forward), [{"x": X}, {"x": X[:5]}])


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize(
    "moved", [lambda x: tf.reverse(x, [0]), lambda x: tf.reverse(x, [-1, 0]), lambda x: tf.roll(x, [1, 2], [0, 1])]
)
def test_readers_of_a_batch_in_another_order_work_on_blocks(moved: Callable[[Any], Any], batch: int | None) -> None:
    def forward() -> dict[str, Any]:
        y = tf.tanh(moved(placeholder("x", batch, 3)) @ variable("w", np.eye(3)))
        return {"loss": tf.reduce_sum(moved(y * y) ** 3), "y": y}

    item = make_item(forward, batch_inputs={"x:0": 0})
    feeds = [{"x": X[:n]} for n in ([5] if batch else [6, 5, 1])]
    assert_trains_alike(item, feeds)
    assert ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"]}).report.coverage > 0.7
    assert ar.verify(item, {"devices": ["CPU:0", "CPU:1"]}, feeds=feeds[0]).ok


@pytest.mark.parametrize("channels", [False, True])
def test_fake_quantisation_with_a_given_range_works_on_blocks(channels: bool) -> None:
    def forward() -> dict[str, Any]:
        x = placeholder("x", None, 3, dtype=tf.float32)
        shape = (3,) if channels else ()
        low, high = (variable(name, np.full(shape, limit, "f4")) for name, limit in (("low", -0.5), ("high", 0.7)))
        quantise = tf.quantization.fake_quant_with_min_max_vars
        if channels:
            quantise = tf.quantization.fake_quant_with_min_max_vars_per_channel
        y = quantise(x @ variable("w", np.eye(3, dtype="f4")), low, high)
        return {"loss": tf.reduce_sum(y * y), "y": y}

    item = make_item(forward)
    assert_trains_alike(item, [{"x": X[:n]} for n in (6, 5, 1)], tolerance=1e-5)
    assert ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"]}).report.coverage > 0.9


@pytest.mark.parametrize("dtype", ["int32", "int64", "int16", "int8", "uint8", "uint16", "uint64"])
@pytest.mark.parametrize("keep_dims", [False, True])
def test_a_mean_of_integers_is_truncated_like_the_kernel_does(dtype: str, keep_dims: bool) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 3), variable("w", np.array([[0.1], [0.2], [0.3]]))
        k = placeholder("k", None, 4, dtype=tf.as_dtype(dtype))
        mean, over_all = tf.reduce_mean(k, 0, keepdims=keep_dims), tf.reduce_mean(k)
        scale = tf.cast(mean, tf.float64)
        return {"loss": tf.reduce_sum(x @ w) * tf.reduce_sum(scale) * 1e-3, "mean": mean, "over_all": over_all}

    # Sums that need more than the type has, and quotients that truncate towards zero.
    k = np.array([[100, 3, -7, 1], [120, 4, -7, 1], [110, 4, -8, 1], [99, 3, -7, 1], [125, 3, -6, 2]]).astype(dtype)
    assert_trains_alike(make_item(forward), [{"x": X[:n], "k": k[:n]} for n in (5, 4, 1)])
