"""Weight gradients that are computed once instead of being added up, where replicas share one device."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from autograph_rewrite import GraphItem
from tests.support.training import distributed, make_item, placeholder, train, variable

WIDTH = 512  # 2 MB of float64


def forward() -> dict[str, tf.Tensor]:
    """Return the loss of a network with two large layers and a small one."""
    rng = np.random.RandomState(0)
    x, y = placeholder("x", None, WIDTH), placeholder("y", None)
    hidden = tf.tanh(x @ variable("w0", rng.randn(WIDTH, WIDTH) * 0.05))
    hidden = tf.tanh(hidden @ variable("w1", rng.randn(WIDTH, WIDTH) * 0.05))
    error = tf.linalg.matvec(hidden, variable("w2", rng.randn(WIDTH) * 0.05)) - y
    return {"loss": tf.reduce_mean(error**2)}


def feeds() -> list[dict[str, np.ndarray]]:
    """Return batches of changing sizes, one of them smaller than the number of replicas."""
    rng = np.random.RandomState(1)
    return [{"x": rng.randn(size, WIDTH), "y": rng.randn(size)} for size in (8, 7, 1, 5)]


def reduced(item: GraphItem) -> set[str]:
    """Return the variables whose gradients are reduced."""
    return {owner for owner in item.report.reductions if owner != "step"}


def test_large_gradients_are_computed_once_where_replicas_share_a_device() -> None:
    item = make_item(forward)
    new = distributed(item, "shared", 3)

    assert reduced(new) == {"w2"}
    expected, found = train(item, feeds()), train(new, feeds())
    for name, value in expected.variables.items():
        np.testing.assert_allclose(found.variables[name], value, rtol=1e-12, atol=1e-14)
    for one, other in zip(expected.fetched, found.fetched, strict=True):
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-12)


def test_they_are_reduced_where_every_replica_has_a_device() -> None:
    assert reduced(distributed(make_item(forward), "mirrored", 2)) == {"w0", "w1", "w2"}


def test_many_rows_are_not_copied_to_save_additions() -> None:
    def many() -> dict[str, tf.Tensor]:
        x = placeholder("x", None, 300, WIDTH)
        w = variable("w", np.eye(WIDTH) * 0.1)
        return {"loss": tf.reduce_mean(tf.reshape(tf.reshape(x, [-1, WIDTH]) @ w, tf.shape(x)) ** 2)}

    assert reduced(distributed(make_item(many), "shared", 2)) == {"w"}
