"""Losses of public libraries: their work is divided, and each step is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.facts.symbolic_dims import joined

Loss = Callable[[tf.Tensor, tf.Variable], tf.Tensor]
CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
WIDTH = 6


def in_batch_softmax(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """Each query against the candidates of all, as recommenders rank."""
    scores = tf.matmul(tf.tanh(x @ w), tf.tanh(x @ tf.transpose(w)), transpose_b=True)
    labels = tf.eye(tf.shape(scores)[0], tf.shape(scores)[1], dtype=x.dtype)
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(labels, scores))


def two_views(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """Each row against all others but itself, as contrastive methods compare."""
    n = tf.shape(x)[0]
    z = tf.math.l2_normalize(tf.tanh(tf.concat([x, x[:, ::-1]], 0) @ w), axis=1)
    scores = tf.matmul(z, z, transpose_b=True) - 1e9 * tf.eye(2 * n, dtype=x.dtype)
    partner = tf.concat([tf.range(n, 2 * n), tf.range(n)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(partner, scores))


def residual(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """Derivatives of a network by two of its inputs, which are joined in front of it."""
    t, s = x[:, :1], x[:, 1:2]

    def field(t: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        joined = tf.concat([t, s], 1)
        return tf.tanh(tf.tanh(tf.concat([joined, joined, joined], 1) @ w) @ w)[:, :1]

    with tf.GradientTape(persistent=True) as outer:
        outer.watch([t, s])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([t, s])
            u = field(t, s)
        by_t, by_s = tape.gradient(u, t), tape.gradient(u, s)
    return tf.reduce_mean(tf.square(by_t + u * by_s - outer.gradient(by_s, s)))


def with_more_dimensions(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """A shape is brought to a rank by ones in front of it, as distributions do with batches of events."""
    z = tf.tanh(x @ w)
    shape = tf.pad(tf.shape(z), [[0, 1]], constant_values=1)
    return tf.reduce_mean(tf.square(tf.reshape(z, shape) * tf.reshape(w, [1, WIDTH, WIDTH])))


def whitened(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """Examples as columns of a triangular system, as sparse Gaussian processes have them."""
    factor = tf.linalg.cholesky(tf.matmul(w, w, transpose_b=True) + 2 * tf.eye(WIDTH, dtype=x.dtype))
    z = tf.linalg.triangular_solve(factor, tf.transpose(tf.tanh(tf.tile(x, [1, 1]) @ w)))
    return tf.reduce_sum(tf.square(z))


LOSSES: tuple[Loss, ...] = (in_batch_softmax, two_views, residual, with_more_dimensions, whitened)


def made(loss: Loss) -> tuple[Any, tf.Variable]:
    w = tf.Variable(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), dtype=tf.float64)

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float64)])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(x, w)
        w.assign_sub(0.1 * tape.gradient(value, w))
        return value

    return step, w


@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_divided_and_that_of_one_device(loss: Loss) -> None:
    (one, w), (other, v) = made(loss), made(loss)
    two = ar.distribute(other, CONFIG)
    for rows in (5, 1, 8):
        x = tf.constant(np.random.default_rng(rows).normal(size=(rows, WIDTH)))
        np.testing.assert_allclose(one(x), two(x), rtol=1e-9)
        np.testing.assert_allclose(w, v, rtol=1e-8, atol=1e-10)
    covered = two.items[0].report.covered.at(512)
    assert covered.share > 0.9, covered.lines(5)


def test_work_on_segments_is_counted_by_all_of_their_rows() -> None:
    sizes = Sizes(batch=10, replicas=2)
    assert sizes.number(joined([1])) == 5
    assert sizes.number(joined([1, 2])) == 15
    assert sizes.number(joined([2, 2])) == 20
