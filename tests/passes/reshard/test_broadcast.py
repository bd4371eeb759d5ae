"""Contractions whose operands broadcast: blocks of one meet a single matrix, or many, of the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import assert_trains_alike, make_item, placeholder, variable

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 2, 3))
EQUATION = "...ij,...jk->...ik"


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 4), (2, 1, 3, 4)])
def test_an_einsum_broadcasts_one_matrix_over_the_batch(shape: tuple[int, ...]) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 2, 3), variable("w", np.ones(shape) * 0.1 + np.arange(4) / 10)
        y = tf.einsum(EQUATION, x, w)
        return {"loss": tf.reduce_sum(y * y) / 100, "y": y}

    assert_trains_alike(make_item(forward), [{"x": X[:4]}, {"x": X}, {"x": X[:1]}])


@pytest.mark.parametrize("product", ["matmul", "einsum"])
@pytest.mark.parametrize("count", [1, 4])
def test_an_operand_of_unknown_batch_size_may_be_one_matrix_or_many(product: str, count: int) -> None:
    matrices = RNG.normal(size=(count, 3, 4))

    def forward() -> dict[str, Any]:
        x, m, w = placeholder("x", None, 2, 3), placeholder("m", None, 3, 4), variable("w", 0.5)
        y = tf.matmul(x * w, m) if product == "matmul" else tf.einsum(EQUATION, x * w, m)
        return {"loss": tf.reduce_sum(y * y) / 100, "y": y}

    item = make_item(forward, batch_inputs={"x": 0, "m": None})
    assert_trains_alike(item, [{"x": X[:4], "m": matrices}])
