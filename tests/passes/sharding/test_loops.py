"""Loops on a model axis: where devices run one program, each has the loop, of its blocks; else variables are gathered.

What a loop writes is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.format.serde import from_bytes
from autograph_rewrite.ir.traversal import topological_order
from tests.support.covering import covering

EXACT = 1e-9
MESHES: dict[str, dict[str, Any]] = {
    "two devices": {"devices": ["CPU:0", "CPU:1"], "mesh": {"model": 2}},
    "two replicas of two": {"devices": [f"CPU:{i}" for i in range(4)], "mesh": {"data": 2, "model": 2}},
    "two replicas of two, mirrored": {
        "devices": [f"CPU:{i}" for i in range(4)],
        "mesh": {"data": 2, "model": 2},
        "strategy": {"variables": "mirrored"},
    },
}
Loss = Callable[[Any, Any], Any]


def item_of(loss_of: Callable[[Any], Loss], shape: tuple[int, int] = (4, 4), spec: Any = None) -> ar.GraphItem:
    """Return the item of a step of descent on a loss of a variable w."""
    w = tf.Variable(np.random.default_rng(0).normal(size=shape) / 2, name="w")
    loss_with = loss_of(w)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_with(x, y)
        w.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, w)))
        return loss

    matrix = tf.TensorSpec([None, 4], tf.float64)
    return ar.GraphItem.from_function(step, matrix if spec is None else spec, matrix)


def recurrent(w: Any) -> Loss:
    """A loop whose body reads the variable, as a cell does."""

    def loss(x: Any, y: Any) -> Any:
        h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]
        return tf.reduce_mean((h - y) ** 2)

    return loss


def nested(w: Any) -> Loss:
    """A loop in a loop."""

    def inner(h: Any) -> Any:
        return tf.while_loop(lambda j, _: j < 2, lambda j, h: (j + 1, tf.tanh(h @ w)), (0, h))[1]

    def loss(x: Any, y: Any) -> Any:
        h = tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, inner(h)), (0, x))[1]
        return tf.reduce_mean((h - y) ** 2)

    return loss


def looked_up(w: Any) -> Loss:
    """A loop that looks rows of the variable up."""

    def loss(ids: Any, y: Any) -> Any:
        zeros = tf.zeros_like(y)
        h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h + tf.nn.embedding_lookup(w, ids)), (0, zeros))[1]
        return tf.reduce_mean((h - y) ** 2)

    return loss


def read_everywhere(w: Any) -> Loss:
    """A loop beside products that the devices share."""

    def loss(x: Any, y: Any) -> Any:
        return recurrent(w)(tf.nn.relu(x @ w), y) + tf.reduce_mean(x @ w)

    return loss


PROGRAMS = {"recurrent": recurrent, "nested": nested, "read everywhere": read_everywhere}


@pytest.mark.parametrize(("program", "mesh", "split"), covering(list(PROGRAMS), list(MESHES), [[2, 1], [1, 2]]))
def test_a_variable_that_a_loop_reads_is_gathered_before_it(program: str, mesh: str, split: list[int]) -> None:
    item = item_of(PROGRAMS[program])
    config = {**MESHES[mesh], "sharding": [{"match": "w", "split": split}]}
    new = ar.rewrite(item, config)
    assert new.variables["w"].shards is not None
    is_gathered = any("'w' is gathered for the loop" in note for note in new.report.plan.notes)
    assert is_gathered == ("mirrored" not in mesh)
    report = ar.verify(item, config)
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


@pytest.mark.parametrize("program", ["recurrent", "nested"])
def test_devices_meet_in_each_iteration_where_a_loop_is_cut(program: str) -> None:
    new = ar.rewrite(
        item_of(PROGRAMS[program]),
        {**MESHES["two replicas of two, mirrored"], "sharding": [{"match": "w", "split": [2, 1]}]},
    )
    graph = from_bytes(new.graph_def.SerializeToString())
    frames = frames_of(topological_order(graph))
    meet = [node for node in graph if node.op.startswith("Collective") and node in frames]
    assert meet
    assert {node.device for node in meet} == {f"/device:CPU:{i}" for i in range(4)}
    joined = [edge.value for edge in new.report.plan.model_edges if edge.lowering == "collective_gather"]
    assert not any("read" in value.lower() for value in joined), "a device has all of the matrix"


def test_loops_are_cut_along_two_axes() -> None:
    mesh = {"data": 1, "model": [2, 2]}
    config = {"devices": [f"CPU:{i}" for i in range(4)], "mesh": mesh, "strategy": {"variables": "mirrored"}}
    for axes in ([0, 1], [1, 0], [-1, 1]):
        report = ar.verify(item_of(recurrent), {**config, "sharding": [{"match": "w", "axes": axes}]})
        assert report.ok, report


def test_rows_that_a_loop_looks_up_are_those_of_the_gathered_table() -> None:
    item = item_of(looked_up, (6, 4), tf.TensorSpec([None], tf.int32))
    config = {**MESHES["two replicas of two"], "sharding": [{"match": "w", "split": [2, 1]}]}
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.integers(0, 6, 8).astype(np.int32), "y": rng.normal(size=(8, 4))} for _ in range(3)]
    report = ar.verify(item, config, feeds=feeds)
    assert report.ok, report


def test_the_loop_reads_what_was_written_before_it() -> None:
    w = tf.Variable(np.eye(4), name="w")

    def step(x: Any) -> Any:
        w.assign_add(tf.ones([4, 4], tf.float64))
        h = tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, h @ w), (0, x))[1]
        loss = tf.reduce_mean(h)
        w.assign_sub(0.1 * tf.ones([4, 4], tf.float64) * loss)
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64))
    report = ar.verify(item, {**MESHES["two devices"], "sharding": [{"match": "w", "split": [1, 2]}]})
    assert report.ok, report


def test_a_variable_that_a_loop_writes_is_cut_and_each_iteration_writes_its_blocks() -> None:
    w = tf.Variable(np.eye(4), name="w")

    def step(x: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            w.assign_add(0.1 * tf.matmul(h, h, transpose_a=True))
            return i + 1, h @ w

        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 2, body, (0, x))[1])

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64))
    for mode in ("shared", "mirrored"):
        mesh = {**MESHES["two devices"], "strategy": {"variables": mode}}
        report = ar.verify(item, {**mesh, "sharding": [{"match": "w", "split": [1, 2]}]})
        assert report.ok, report


def test_a_loop_of_tensorflow_1_reads_the_gathered_variable() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.disable_control_flow_v2()
        try:
            x = tf.compat.v1.placeholder(tf.float64, [None, 4], name="x")
            w = tf.compat.v1.get_variable("w", initializer=np.eye(4) / 2, use_resource=True)
            h = tf.compat.v1.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]
            loss = tf.reduce_mean(h**2, name="loss")
            tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
            init = tf.compat.v1.global_variables_initializer()
        finally:
            tf.compat.v1.enable_control_flow_v2()
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op=init.name)
    report = ar.verify(item, {**MESHES["two replicas of two"], "sharding": [{"match": "w", "split": [1, 2]}]})
    assert report.ok, report


@pytest.mark.parametrize(("mesh", "is_cut"), covering(list(MESHES), [True, False]))
def test_a_tensor_array_of_tensorflow_1_holds_whole_values(mesh: str, is_cut: bool) -> None:
    v1, graph, rng = tf.compat.v1, tf.Graph(), np.random.default_rng(0)
    with graph.as_default():
        v1.disable_control_flow_v2()
        try:
            x = v1.placeholder(tf.float64, [None, 4], name="x")
            up, down = (
                v1.get_variable(name, initializer=rng.normal(size=shape), use_resource=True)
                for name, shape in (("up", (4, 6)), ("down", (6, 4)))
            )
            map_rows = lambda rows: tf.map_fn(lambda row: tf.sin(row) * 2.0, rows)  # noqa: E731
            h = tf.tanh(x @ up)
            h = map_rows(h) @ down if is_cut else map_rows(h @ down)
            loss = tf.reduce_mean(h**2, name="loss")
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
            init = v1.global_variables_initializer()
        finally:
            v1.enable_control_flow_v2()
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op=init.name)
    sharding = [{"match": "up", "split": [1, 2]}, {"match": "down", "split": [2, 1]}]
    report = ar.verify(item, {**MESHES[mesh], "sharding": sharding})
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


@pytest.mark.parametrize("split", [["model", 1], [1, "model"]], ids=["rows", "columns"])
def test_lists_are_whole_where_they_would_have_to_be_converted(split: list[Any]) -> None:
    """The gradient of the second layer's outputs comes in whole, and its loop would write blocks into that list."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 3), dtype="float64")
    hidden = keras.layers.LSTM(4, return_sequences=True, name="lstm", dtype="float64")(inputs)
    hidden = keras.layers.GRU(4, name="gru", dtype="float64")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, name="out", dtype="float64")(hidden))
    model.compile("sgd", "mse")
    item = ar.GraphItem.from_keras(model, tf.TensorSpec([None, 5, 3], tf.float64), tf.TensorSpec([None, 2], tf.float64))
    cut = {"match": "(lstm/.*/recurrent_kernel|gru/.*/(recurrent_)?kernel)", "split": split}
    report = ar.verify(item, {**MESHES["two replicas of two, mirrored"], "sharding": [cut]})
    assert report.ok, report


@pytest.mark.parametrize(
    ("layer", "mesh"), covering(["SimpleRNN", "LSTM", "GRU"], ["two replicas of two, mirrored", "two replicas of two"])
)
def test_a_recurrent_layer_of_keras_trains_with_cut_kernels(layer: str, mesh: str) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 3), dtype="float64")
    hidden = getattr(keras.layers, layer)(4, name="cell", dtype="float64")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="out", dtype="float64")(hidden))
    model.compile("sgd", "mse")
    specs = [tf.TensorSpec([None, 5, 3], tf.float64), tf.TensorSpec([None, 2], tf.float64)]
    item = ar.GraphItem.from_keras(model, *specs)
    config = {
        **MESHES[mesh],
        "sharding": [{"match": ".*/(recurrent_)?kernel", "split": [1, "model"]}],
    }
    report = ar.verify(item, config)
    assert report.ok, report
