"""Ops that mix all examples of a batch give what they give on one device, values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import assert_trains_alike, make_item, placeholder, variable

X = np.random.default_rng(0).normal(size=(6, 3))


@pytest.mark.parametrize("range_given", [False, True])
def test_quantisation_takes_its_range_from_the_whole_batch(range_given: bool) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 3), variable("w", np.array([[0.1], [0.2], [0.3]]))
        y = tf.quantization.quantize_and_dequantize_v2(x @ w, -0.3, 0.4, range_given=range_given)
        return {"loss": tf.reduce_sum(y * y), "y": y}

    assert_trains_alike(make_item(forward), [{"x": X}, {"x": X[:5]}])


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
