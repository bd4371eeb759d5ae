"""A session gives a variable's value for its name or object, as a v1 Session does; a train op may be a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.support.tf1 import F64, Built, as_in_tensorflow_1, assert_as_tensorflow, descent, feeds, regression
from tests.support.training import MODES, distributed, v1

X = feeds()[0]["x:0"]


def counted(**declared: bool) -> tuple[GraphItem, Any, Any]:
    """Return an item with resource variables, its weights and its step counter."""
    with tf.Graph().as_default() as graph:
        _, w, loss = regression(reference=False)
        count = v1.train.get_or_create_global_step()
        train = descent(loss, global_step=count)
        v1.group(v1.global_variables_initializer(), name="init_all")
    outputs = [loss, count, w] if declared.get("outputs") else [loss]
    return GraphItem.from_graph(graph, train_op=train, outputs=outputs, init_op="init_all"), w, count


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_resource_variable_is_fetched_for_its_value_before_the_step(mode: str, declared: bool) -> None:
    item, w, count = counted(outputs=declared)
    with distributed(item, mode).session() as session:
        session.run("init_all")
        before = session.read_variable("w")
        nested = {
            "w": ["w", "w:0", w, "w/Read/ReadVariableOp:0"],
            "count": (count, "global_step"),
            "t": item.targets[0],
        }
        got = session.run(nested, {"x:0": X}, timeout_ms=30000)
        for value in got["w"]:
            np.testing.assert_array_equal(value, before)
        assert got["t"] is None
        assert [np.asarray(value).tolist() for value in got["count"]] == [0, 0]
        after = session.run([count, w])
    assert after[0] == 1
    assert after[0].dtype == np.int64
    assert not np.allclose(after[1], before)


@pytest.mark.parametrize(
    "strategy",
    [{"name": "PS"}, {"name": "FSDP"}, {"name": "PartitionedPS"}, {"name": "PartitionedAR", "variables": "mirrored"}],
    ids=lambda strategy: strategy["name"],
)
def test_a_variable_that_lives_elsewhere_or_in_shards_is_fetched_whole(strategy: dict[str, str]) -> None:
    item, w, count = counted()
    new = ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"], "strategy": strategy})
    with item.session() as one, new.session() as session:
        for running in (one, session):
            running.run("init_all")
            running.run(item.targets[0], {"x:0": X})
        np.testing.assert_allclose(session.run(w), one.read_variable("w"), 1e-9)
        assert session.run(["w:0", count, "global_step"])[1:] == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_reference_variable_is_fetched_as_the_run_leaves_it(mode: str) -> None:
    with tf.Graph().as_default() as graph, as_in_tensorflow_1():
        _, w, loss = regression()
        count = v1.train.get_or_create_global_step()
        train = descent(loss, global_step=count)
        v1.group(v1.global_variables_initializer(), name="init_all")
    item = GraphItem.from_graph(graph, train_op=train, outputs=[loss], init_op="init_all")
    with v1.Session(graph=graph) as one, distributed(item, mode).session() as session:
        for running in (one, session):
            running.run("init_all")
        fetches = [w, count, "w:0", "w/read:0", train]
        for step in range(2):
            expected = one.run(fetches, {"x:0": X})
            got = session.run(fetches, {"x:0": X}, timeout_ms=30000)
            assert got[1] == expected[1] == step + 1
            for a, b in zip(got[:4], expected[:4], strict=True):
                np.testing.assert_allclose(a, b, 1e-9)


def branch() -> Built:
    _, _, loss = regression()
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss)

    def yes() -> Any:
        with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
            return tf.identity(loss)

    return tf.cond(loss > 0.3, yes, lambda: loss * 2), [loss]


def case() -> Built:
    _, _, loss = regression()
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss)

    def by(factor: float) -> Callable[[], Any]:
        def run() -> Any:
            with tf.control_dependencies([optimizer.apply_gradients([(g * factor, v) for g, v in pairs])]):
                return tf.constant(factor)

        return run

    return tf.case([(loss > 0.5, by(1.0)), (loss > 0.3, by(2.0))], default=by(3.0)), [loss]


def sum_behind_the_step() -> Built:
    x, w, loss = regression()
    with tf.control_dependencies([descent(loss)]):
        return tf.reduce_sum(tf.matmul(x, w)), [loss]


def rows_behind_the_step() -> Built:
    x, w, loss = regression()
    with tf.control_dependencies([descent(loss)]):
        return tf.matmul(x, w), [loss]


def several() -> Built:
    _, _, loss = regression()
    with tf.control_dependencies([loss]):
        train = descent(loss)
    with tf.control_dependencies([train]):
        value = tf.identity(loss)
    return [train, value, tf.cond(loss > 0.3, lambda: tf.constant(1), lambda: tf.constant(2))], [loss]


def loop() -> Built:
    x, w, loss = regression()
    start = [tf.constant(0), tf.constant(0.0, F64)]

    def body(i: Any, total: Any) -> Any:
        with tf.control_dependencies([total]):
            update = v1.assign_sub(w, 0.1 * tf.matmul(x, tf.matmul(x, w), transpose_a=True) / tf.cast(tf.size(x), F64))
        with tf.control_dependencies([update]):
            return i + 1, total + tf.reduce_sum(w)

    with tf.control_dependencies([loss]):
        return v1.while_loop(lambda i, _: i < 3, body, start)[1], [loss]


@pytest.mark.parametrize("build", [branch, case, sum_behind_the_step, rows_behind_the_step, several, loop])
def test_a_train_op_that_is_a_value_is_run_and_fetched(build: Callable[[], Built]) -> None:
    def fetched() -> Built:
        train, fetches = build()
        found = train if isinstance(train, list) else [train]
        return train, [*fetches, *(one for one in found if isinstance(one, tf.Tensor))]

    assert_as_tensorflow(fetched)


@pytest.mark.parametrize("mode", MODES)
def test_the_value_of_a_train_op_that_was_named_as_an_operation_can_be_fetched(mode: str) -> None:
    with tf.Graph().as_default() as graph, as_in_tensorflow_1():
        train, [loss] = branch()
        v1.group(v1.global_variables_initializer(), name="init_all")
    item = GraphItem.from_graph(graph, train_op=train.op, outputs=[loss], init_op="init_all")
    with distributed(item, mode).session() as session:
        session.run("init_all")
        value, nothing, loss_value = session.run([train, train.op, loss], {"x:0": X}, timeout_ms=30000)
    assert nothing is None
    np.testing.assert_allclose(value, loss_value if loss_value > 0.3 else 2 * loss_value, 1e-9)
