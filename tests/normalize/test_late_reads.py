"""Who reads a legacy reference variable behind an update sees the updated value, as in a v1 Session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite import GraphItem
from tests.support.tf1 import F64, Built, as_in_tensorflow_1, assert_as_tensorflow, descent, feeds, regression, variable
from tests.support.training import distributed, v1

behind = tf.control_dependencies


def moving_average() -> Built:
    _, w, loss = regression()
    with behind([descent(loss)]):
        return tf.group(v1.train.ExponentialMovingAverage(0.5).apply([w])), [loss]


def schedule_behind_the_step() -> Built:
    _, _, loss = regression()
    count = v1.train.get_or_create_global_step()
    rate = v1.train.exponential_decay(tf.constant(0.1, F64), count, 1, 0.5)
    train = v1.train.GradientDescentOptimizer(rate).minimize(loss, global_step=count)
    with behind([train]):
        following = v1.train.exponential_decay(tf.constant(0.1, F64), count, 1, 0.5)
    return tf.group(train, following), [loss, rate * 1, following]


def readers_between_updates() -> Built:
    _, w, loss = regression()
    slope = v1.gradients(loss, [w])[0]
    early, fetches, last = w.value(), [loss], [loss]
    for count in range(3):
        with behind(last):
            update = v1.assign_sub(w, 0.1 * slope * (count + 1))
        with behind([update.op]):
            last = [tf.reduce_sum(w * 2.0), tf.reduce_sum(tf.reshape(early, [6]) * tf.range(6, dtype=F64))]
        fetches += last
    return tf.group(update, *last), fetches


def value_of_an_assignment() -> Built:
    _, w, loss = regression()
    other = variable("other", np.zeros([3, 2]), trainable=False)
    with behind([loss]):
        first = v1.assign(w, w - 0.1 * v1.gradients(loss, [w])[0], use_locking=True)
    second = v1.assign_add(v1.assign(other, first * 2), tf.identity(tf.identity(first)))
    with behind([second]):
        total = tf.reduce_sum(other.value() * 2)
    return total, [loss, tf.reduce_sum(first), total]


def branches() -> Built:
    _, w, loss = regression()
    slope, early = v1.gradients(loss, [w])[0], w.value()

    def updated(rate: float) -> Any:
        with behind([v1.assign_sub(w, rate * slope)]):
            return tf.reduce_sum(early * 3)

    taken = tf.cond(loss > 0.3, lambda: updated(0.1), lambda: updated(0.3))
    with behind([taken]):
        return taken, [loss, taken, tf.reduce_sum(early * 7)]


def branches_that_return_assignments() -> Built:
    _, w, loss = regression()
    slope = v1.gradients(loss, [w])[0]
    chosen = tf.cond(loss > 0.3, lambda: v1.assign_sub(w, 0.1 * slope), lambda: v1.assign_sub(w, 0.3 * slope))
    first = tf.reduce_sum(chosen * 2)
    with behind([first]), behind([v1.assign_add(w, np.full([3, 2], 0.01))]):
        second = tf.reduce_sum(chosen * 3)
    return tf.group(first, second), [first, second]


def loop_behind_the_step() -> Built:
    _, w, loss = regression()
    early, start = w.value(), [tf.constant(0), tf.constant(0.0, F64)]
    with behind([descent(loss)]):
        total = v1.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t + tf.reduce_sum(early)), start)[1]
    return total, [loss, total]


def updates_in_a_loop() -> Built:
    x, w, loss = regression()
    early, start = w.value(), [tf.constant(0), tf.constant(0.0, F64)]

    def body(i: Any, total: Any) -> Any:
        with behind([total]):
            h = tf.tanh(tf.matmul(x, early))
            rows = tf.cast(tf.shape(x)[0], F64)
            update = v1.assign_sub(w, 0.1 * tf.matmul(x, 1 - h * h, transpose_a=True) / rows)
        with behind([update]):
            return i + 1, total + tf.reduce_sum(h) + tf.reduce_sum(early * 2)

    with behind([loss]):
        total = v1.while_loop(lambda i, _: i < 3, body, start)[1]
    return total, [loss, total]


def loop_that_returns_an_assignment() -> Built:
    _, w, loss = regression()
    count, start = variable("count", 1.0, trainable=False), [tf.constant(0), tf.constant(0.5, F64)]
    with behind([descent(loss)]):
        found = v1.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, v1.assign_add(count, t + tf.reduce_sum(w))), start
        )
    return found[1], [loss, found[1] * 1]


def rows() -> Built:
    _, _, loss = regression()
    table, ids = variable("table", np.linspace(0, 1, 20).reshape(10, 2)), v1.placeholder(tf.int32, [None], "ids")
    loss += tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids)))
    train = v1.train.AdagradOptimizer(0.1).minimize(loss)
    with behind([train]):
        looked = tf.reduce_sum(tf.nn.embedding_lookup(table, ids)) + tf.reduce_sum(table * 1.0)
    with behind([looked]), behind([v1.scatter_add(table, [1, 2], np.ones([2, 2]))]):
        squares = tf.reduce_sum(table * table)
    return tf.group(train, squares), [loss, looked, squares]


def slot() -> Built:
    _, w, loss = regression()
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    train = optimizer.minimize(loss)
    with behind([train]):
        total = tf.reduce_sum(optimizer.get_slot(w, "momentum") * 2)
    return tf.group(train, total), [loss, total]


def aliases_of_aliases() -> Built:
    _, w, loss = regression()
    row = tf.expand_dims(tf.reshape(tf.identity(tf.stop_gradient(w.value())), [6]), 0)
    train = descent(loss)
    with behind([train]):
        square, twice = tf.matmul(row, row, transpose_b=True), tf.concat([row, row], 0)
    return tf.group(train, square, twice), [loss, square, twice]


def what_is_fetched() -> Built:
    _, w, loss = regression()
    count = v1.train.get_or_create_global_step()
    return descent(loss, global_step=count), [loss, w, count, w.value(), tf.identity(count)]


def averages_of_statistics() -> Built:
    x, w, _ = regression()
    mean, count = variable("mean", np.zeros(2), trainable=False), v1.train.get_or_create_global_step()
    moments = tf.nn.moments(tf.matmul(x, w), [0])
    loss = tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, w) - moments[0])))
    with behind([v1.assign_sub(mean, (mean - moments[0]) * 0.1)]):
        train = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=count)
    with behind([train]):
        average = v1.train.ExponentialMovingAverage(0.9, count, zero_debias=True).apply([w])
        total = tf.reduce_sum(mean * 3.0)
    return tf.group(average, total), [loss, total]


CASES = (
    moving_average, schedule_behind_the_step, readers_between_updates, value_of_an_assignment, branches,
    branches_that_return_assignments, loop_behind_the_step, updates_in_a_loop, loop_that_returns_an_assignment, rows,
    slot, aliases_of_aliases, what_is_fetched, averages_of_statistics,
)  # fmt: skip


@pytest.mark.parametrize("build", CASES, ids=[case.__name__ for case in CASES])
def test_a_reader_behind_an_update_sees_the_updated_value(build: Callable[[], Built]) -> None:
    ids = np.random.default_rng(1).integers(0, 10, 7)
    batches = [feed | ({"ids:0": ids[: len(feed["x:0"])]} if build is rows else {}) for feed in feeds()]
    assert_as_tensorflow(build, batches)


def test_a_race_of_a_reader_with_an_update_is_noted_with_both_names() -> None:
    with tf.Graph().as_default() as graph, as_in_tensorflow_1():
        _, w, loss = regression()
        penalty = tf.nn.l2_loss(w, name="penalty")
        train = descent(loss)
        v1.group(v1.global_variables_initializer(), name="init_all")
    item = GraphItem.from_graph(graph, train_op=train, outputs=[loss, penalty], init_op="init_all")
    [note] = [note for note in distributed(item, "shared").report.notes if "no edge orders" in note.text]
    assert note.node == "w"
    assert "'penalty'" in note.text
    assert "GradientDescent/update_w" in note.text
