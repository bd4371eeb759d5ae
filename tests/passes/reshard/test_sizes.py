"""Values that depend on how many examples there are, or that are cut by a number computed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.training import assert_trains_alike, make_item, placeholder, variable

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4))
W = RNG.normal(size=(4, 4)) * 0.3
Build = Callable[[], Mapping[str, Any]]


def number_of_elements() -> Mapping[str, Any]:
    """Divide by the size of a tensor of which no dimension is known."""
    x, w = placeholder("x", None, None), variable("w", 0.5)
    return {"loss": tf.reduce_sum(x * w * w) / tf.cast(tf.size(x), x.dtype), "size": tf.size(x)}


def halves() -> Mapping[str, Any]:
    """Cut the batch in two at a place that is computed, and use both parts differently."""
    x, w = placeholder("x", None, 4), variable("w", W)
    half = tf.shape(x)[0] // 2
    return {"loss": tf.reduce_sum(tf.tanh(x[:half] @ w)) + 2 * tf.reduce_sum(x[half:] @ w), "first": x[:half]}


def shapes_kept_by_a_loop() -> Mapping[str, Any]:
    """The gradient of a loop keeps the shape of each iteration's block."""
    x, w = placeholder("x", None, 4), variable("w", W[:2, :2])

    def body(i: Any, y: Any) -> tuple[Any, Any]:
        pairs = tf.tanh(tf.reshape(y, [-1, 2]) @ w)
        return i + 1, y + tf.reshape(pairs, tf.shape(y)) * tf.broadcast_to(tf.reduce_sum(w), tf.shape(y))

    y = tf.while_loop(lambda i, _: i < 3, body, [0, x], maximum_iterations=4)[1]
    return {"loss": tf.reduce_mean(y * y), "y": y}


def similarities(axis: int, *order: int) -> Mapping[str, Any]:
    """Put similarities beside or below each other whose blocks are rows, and columns."""
    x, w = placeholder("x", None, 4), variable("w", W)
    y = tf.matmul(x, x @ w, transpose_b=True)
    pieces = y, tf.transpose(tf.tanh(y))
    return {"loss": tf.reduce_sum(tf.sin(tf.concat([pieces[i] for i in order], axis)))}


def trace() -> Mapping[str, Any]:
    """Sum the diagonal of similarities: its gradient puts a row of the batch on a diagonal."""
    x, w = placeholder("x", None, 4), variable("w", W)
    return {"loss": tf.einsum("bb->", tf.nn.log_softmax((x @ w) @ tf.transpose(x)))}


def diagonals() -> Mapping[str, Any]:
    """Add diagonals of examples to one of the batch: gradients state sizes of which the run computes one."""
    x, w = placeholder("x", None, 4), variable("w", W)
    y = x @ w
    of_each = tf.linalg.diag_part(tf.linalg.diag(y))
    return {"loss": tf.reduce_mean(of_each + tf.linalg.tensor_diag_part(y @ tf.transpose(y))[:, None])}


def pairs_of_a_sequence() -> Mapping[str, Any]:
    """Subtract from rows what a convolution along the batch makes of all pairs: gradients read sizes of the whole."""
    x, w, k = placeholder("x", None, 4), variable("w", W), variable("k", RNG.normal(size=(3, 4, 4)))
    h = tf.nn.conv1d(x[None], k, 1, "SAME")[0]
    rows, columns = tf.meshgrid(h[:, 0], h[:, 1], indexing="ij")
    logits = (h - tf.reduce_max(rows - columns, 0)[:, None]) @ w
    labels = tf.argmax(x, 1, output_type=tf.int32)
    return {"loss": tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))}


PAIRS = [partial(similarities, axis, *order) for axis in (0, 1) for order in ((0, 1), (1, 0), (0, 0, 1))]


@pytest.mark.parametrize("build", [number_of_elements, halves, shapes_kept_by_a_loop, trace, diagonals, *PAIRS])
@pytest.mark.parametrize("replicas", [2, 3])
def test_sizes_are_those_of_the_whole_batch(build: Build, replicas: int) -> None:
    assert_trains_alike(make_item(build), [{"x": X[:n]} for n in (6, 5, 2)], replicas=replicas)


@pytest.mark.parametrize("build", [pairs_of_a_sequence, diagonals, trace])
def test_a_batch_of_one_example_leaves_a_block_without_rows(build: Build) -> None:
    assert_trains_alike(make_item(build), [{"x": X[:n]} for n in (6, 1)])


@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 2)])
def test_how_many_pairs_of_examples_there_are_is_counted_once_also_on_a_model_axis(data: int, model: int) -> None:
    def forward() -> Mapping[str, Any]:
        h = tf.tanh(placeholder("x", None, 4) @ variable("w", W))
        return {"loss": tf.reduce_mean(tf.square(h @ tf.transpose(h)))}

    mesh = {"mesh": {"data": data, "model": model}, "sharding": [{"match": "w", "split": [1, model]}]}
    config = {"devices": [f"CPU:{i}" for i in range(data * model)], "strategy": {"variables": "mirrored"}, **mesh}
    report = ar.verify(make_item(forward, batch_inputs={"x": 0}), config)
    assert report.ok, report


@pytest.mark.parametrize("batch", [6, None])
def test_the_gradient_of_a_part_of_a_gradient_counts_once(batch: int | None) -> None:
    """It is a sum over the batch until the part is known to be reduced: what was known before had been kept."""

    def forward() -> Mapping[str, Any]:
        x, w = placeholder("x", batch, 4), variable("w", W)
        y = tf.clip_by_value(x @ w, -1.0, 1.0)
        (slope,) = tf.gradients(tf.reduce_sum(y * y), [w])
        part = tf.unstack(slope, axis=-1)[0]
        return {"loss": tf.reduce_sum(x @ w) + tf.reduce_sum(tf.tanh(part)), "spread": tf.math.reduce_std(slope, 0)}

    item = make_item(forward, batch_inputs={"x": 0})
    for replicas in (2, 3):
        assert_trains_alike(item, [{"x": X}] * 2, replicas=replicas)


def test_batches_of_as_many_elements_but_another_shape_are_told_apart() -> None:
    """TensorFlow remembers the shape that a collective had when it first met."""

    def forward() -> Mapping[str, Any]:
        x, w = placeholder("x", None, None), variable("w", 0.5)
        y = x * w
        return {"loss": tf.reduce_sum(y * y), "y": y, "columns": tf.reduce_sum(y * y, 0) * 2}

    feeds = [{"x": RNG.normal(size=shape)} for shape in ((2, 6), (4, 3), (6, 2), (3, 4), (2, 6))]
    assert_trains_alike(make_item(forward), feeds)


def test_an_input_may_be_read_for_its_size_only() -> None:
    """Blocks are measured on the input that most depends on; nobody else needs a block of it."""

    def forward() -> Mapping[str, Any]:
        x, z, w = placeholder("x", None, 4), placeholder("z", None, None), variable("w", W)
        count = tf.cast(tf.shape(z)[0], x.dtype)
        for _ in range(12):
            count = tf.sqrt(count)
        return {"loss": tf.reduce_sum(x @ w) * count, "y": x @ w, "scaled": tf.tanh(x @ w) * count}

    assert_trains_alike(make_item(forward), [{"x": X[:n], "z": X[:n, :2]} for n in (6, 5, 1)])


@pytest.mark.parametrize("limit", [99.0, -99.0])
def test_zeros_shaped_like_the_batch_do_not_join_a_sum_over_it(limit: float) -> None:
    """Either arm may be chosen: the zeros, of which each replica has its rows, or the sum over all rows."""

    def forward() -> Mapping[str, Any]:
        x, w = placeholder("x", None, 4), variable("w", W)
        chosen = tf.where(tf.reduce_sum(w) > limit, tf.zeros_like(x), tf.zeros([4], x.dtype) + tf.reduce_sum(x, 0))
        return {"loss": tf.reduce_sum(tf.tanh(x @ w)) + tf.reduce_sum(chosen) * 0.01}

    assert_trains_alike(make_item(forward), [{"x": X[:n]} for n in (6, 5)])
