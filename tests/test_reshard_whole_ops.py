"""Ops whose result depends on the whole batch give what they give on one device, values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training import assert_trains_alike, make_item, placeholder, variable

X = np.random.default_rng(0).normal(size=(6, 3))


@pytest.mark.parametrize("range_given", [False, True])
def test_quantisation_takes_its_range_from_the_whole_batch(range_given: bool) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 3), variable("w", np.array([[0.1], [0.2], [0.3]]))
        y = tf.quantization.quantize_and_dequantize_v2(x @ w, -0.3, 0.4, range_given=range_given)
        return {"loss": tf.reduce_sum(y * y), "y": y}

    assert_trains_alike(make_item(forward), [{"x": X}, {"x": X[:5]}])
