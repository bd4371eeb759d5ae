"""Random feeds suit the graph: ids stay below the tables' sizes, labels below the number of classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.check.random_feeds import batch_size, random_feeds

v1 = tf.compat.v1
CONFIG = {"devices": ["CPU:0", "CPU:1"], "timeout_seconds": 20}


def item_of(build: Callable[[], None], **options: Any) -> ar.GraphItem:
    graph = tf.Graph()
    with graph.as_default():
        build()
        v1.global_variables_initializer()
    return ar.GraphItem.from_graph(graph, outputs=["loss"], init_op="init", **options)


def feed(build: Callable[[], None], batch: int = 200) -> dict[str, np.ndarray[Any, Any]]:
    return random_feeds(item_of(build), steps=1, batch=batch, seed=0)[0]


def table(rows: int) -> Any:
    return v1.get_variable("table", [rows, 2], initializer=v1.ones_initializer(), use_resource=True)


def test_ids_are_below_the_number_of_rows_of_the_table_that_they_look_up() -> None:
    def build() -> None:
        ids = v1.placeholder(tf.int64, [None, 4], name="ids")
        looked_up = tf.nn.embedding_lookup(table(7), tf.reshape(tf.cast(ids, tf.int32), [-1]))
        tf.reduce_sum(looked_up, name="loss")

    ids = feed(build)["ids"]
    assert ids.dtype == np.int64
    assert set(np.unique(ids)) == set(range(7))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32"])
def test_labels_are_below_the_number_of_classes_whatever_their_type(dtype: str) -> None:
    def build() -> None:
        labels = v1.placeholder(dtype, [None, 1], name="labels")
        logits = v1.placeholder(tf.float32, [None, 5], name="logits")
        classes = tf.cast(tf.squeeze(labels, axis=1), tf.int64)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
        tf.reduce_mean(losses, name="loss")

    labels = feed(build)["labels"]
    assert labels.dtype == dtype
    assert set(np.unique(labels)) == set(range(5))


def test_the_smallest_of_several_limits_counts() -> None:
    def build() -> None:
        ids = v1.placeholder(tf.int32, [None], name="ids")
        hot = tf.one_hot(ids, 3)
        tf.reduce_sum(tf.matmul(hot, tf.gather(tf.ones([9, 3]), ids), transpose_a=True), name="loss")

    assert feed(build)["ids"].max() == 2


def test_integers_that_index_nothing_are_zeros_and_ones() -> None:
    def build() -> None:
        tf.reduce_sum(tf.cast(v1.placeholder(tf.int32, [None], name="mask"), tf.float32), name="loss")

    assert set(feed(build)["mask"]) == {0, 1}


def test_targets_of_a_dense_cross_entropy_are_distributions() -> None:
    def build() -> None:
        labels = v1.placeholder(tf.float32, [None, 4], name="labels")
        logits = v1.placeholder(tf.float32, [None, 4], name="logits")
        tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits), name="loss")

    labels = feed(build)["labels"]
    assert labels.min() >= 0
    np.testing.assert_allclose(labels.sum(axis=1), 1.0, rtol=1e-5)


def test_defaults_that_are_no_batch_keep_their_value() -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None], name="x")
        rate = v1.placeholder_with_default(0.5, [], name="rate")
        tf.multiply(tf.reduce_sum(x), rate, name="loss")

    assert feed(build).keys() == {"x"}


def test_equal_seeds_give_equal_feeds_and_steps_differ() -> None:
    def build() -> None:
        tf.reduce_sum(v1.placeholder(tf.float32, [None, 3], name="x"), name="loss")

    item = item_of(build)
    first, second = random_feeds(item, steps=2, batch=5, seed=1)
    again = random_feeds(item, steps=2, batch=5, seed=1)
    np.testing.assert_array_equal(first["x"], again[0]["x"])
    assert not np.array_equal(first["x"], second["x"])
    assert not np.array_equal(first["x"], random_feeds(item, steps=1, batch=5, seed=2)[0]["x"])


@pytest.mark.parametrize(("replicas", "size"), [(1, 3), (2, 5), (3, 7), (4, 11), (8, 17)])
def test_the_batch_is_a_prime_that_does_not_split_evenly(replicas: int, size: int) -> None:
    def build() -> None:
        tf.reduce_sum(v1.placeholder(tf.float32, [None], name="x"), name="loss")

    item = item_of(build)
    assert batch_size(item, replicas) == size
    assert batch_size(item, replicas, 12) == 12


def test_a_batch_that_the_graph_fixes_is_kept() -> None:
    def build() -> None:
        tf.reduce_sum(v1.placeholder(tf.float32, [6, 2], name="x"), name="loss")

    item = item_of(build, batch_inputs={"x": 0})
    assert batch_size(item, 4) == 6
    with pytest.raises(ar.GraphError, match=r"x: 6.*but 8"):
        batch_size(item, 2, 8)


def training_item() -> ar.GraphItem:
    def build() -> None:
        ids = v1.placeholder(tf.int32, [None], name="ids")
        tf.reduce_sum(tf.gather(table(4), tf.abs(ids) + 2), name="loss")  # its limit cannot be seen
        v1.train.GradientDescentOptimizer(0.1).minimize(
            v1.get_default_graph().get_tensor_by_name("loss:0"), name="train"
        )

    item = item_of(build)
    return replace(item, targets=("train",))


def test_feeds_that_the_original_cannot_take_are_an_error_that_says_how_to_pass_others() -> None:
    with pytest.raises(ar.GraphError, match=r"original graph fails in step 1(.|\n)*feeds="):
        ar.verify(training_item(), CONFIG, feeds={"ids": np.array([7, 8, 9])})


def test_feeds_of_the_caller_are_used_in_turn_under_any_name() -> None:
    feeds = [{"ids": np.array([0, 1, 1])}, {"ids:0": np.array([1, 0, 1, 1, 0])}]
    report = ar.verify(training_item(), CONFIG, feeds=feeds, steps=3)
    assert report.ok, str(report)
    assert report.batch is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"feeds": []}, "feeds is empty"), ({"steps": 0}, "at least 1"), ({"feeds": {"y": 1}}, "'y'")],
)
def test_impossible_requests_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ar.GraphError, match=message):
        ar.verify(training_item(), CONFIG, **options)


def test_an_input_that_cannot_be_made_up_is_named() -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, None, name="anything")
        tf.reduce_sum(x, name="loss")

    with pytest.raises(ar.GraphError, match="rank of input 'anything'"):
        random_feeds(item_of(build), steps=1, batch=3, seed=0)
