"""A session of a distributed graph takes the names of the original: what is fetched, fed, run and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.support.training import MODES, assert_trains_alike, distributed, make_item, placeholder, train, v1, variable

X = np.random.default_rng(0).normal(size=(5, 4))
W = np.linspace(-1, 1, 16).reshape(4, 4)


def first_fetch(item: GraphItem, fetches: Any, feed: Mapping[str, Any]) -> Any:
    """Return what a fresh session fetches."""
    with item.session() as session:
        session.run(item.init_op)
        return session.run(fetches, dict(feed), timeout_ms=30000)


def two_parts() -> Mapping[str, Any]:
    x, w = placeholder("x", None, 4), variable("w", W)
    first, second = tf.split(tf.tanh(x @ w), 2, axis=1, name="parts")
    return {"loss": tf.reduce_sum(first * 2 + second), "second": second}


@pytest.mark.parametrize("mode", MODES)
def test_an_output_that_nobody_declared_can_be_fetched_beside_one_that_is(mode: str) -> None:
    item = make_item(two_parts)
    second = item.outputs["out_second"]
    item = replace(item, outputs={"out_loss": item.outputs["out_loss"], "parts:1": replace(second, tensor="parts:1")})
    for fetches in ("parts:0", ["parts:1", "parts:0"], ["out_loss", "parts:0"]):
        want = first_fetch(item, fetches, {"x": X})
        got = first_fetch(distributed(item, mode), fetches, {"x": X})
        for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(one, other, 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("declared", [True, False])
def test_a_convolution_of_an_empty_block_is_fetched_without_the_row_that_guards_it(mode: str, declared: bool) -> None:
    def forward() -> Mapping[str, Any]:
        image = placeholder("image", None, 4, 4, 1, dtype=tf.float32)
        c = tf.nn.conv2d(image, variable("w", np.ones((3, 3, 1, 2), np.float32)), 1, "SAME", name="c")
        return {"loss": tf.reduce_sum(c * c)} | ({"c": c} if declared else {})

    item = make_item(forward)
    for batch in (1, 2, 4):
        feed = {"image": np.random.default_rng(batch).normal(size=(batch, 4, 4, 1)).astype(np.float32)}
        got = first_fetch(distributed(item, mode, 3), ["c", "out_loss"], feed)
        assert got[0].shape == (batch, 4, 4, 2)
        for one, other in zip(got, first_fetch(item, ["c", "out_loss"], feed), strict=True):
            np.testing.assert_allclose(one, other, 1e-4)


def predicted() -> Mapping[str, Any]:
    y, x = placeholder("y", None, 1), placeholder("x", None, 4)
    p = tf.matmul(x, variable("w", W[:, :1]), name="p")
    column = tf.tile(variable("c", 0.5)[None, None], tf.stack([tf.shape(x)[0], 1]))
    loss = tf.reduce_mean(tf.square(p + column - y))
    return {"loss": loss, "p": p, "mean": tf.reduce_mean(p) + tf.reduce_sum(column), "shown": y * 2}


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_a_fetch_does_not_need_is_not_fed(mode: str) -> None:
    """Blocks are measured on one input; a fetch that does not depend on it must not ask for it."""
    item = make_item(predicted)
    rewritten = distributed(item, mode)
    feeds = {"x": X}, {"y": X[:, :1]}
    for fetch, feed in (("out_p", feeds[0]), ("p", feeds[0]), ("out_mean", feeds[0]), ("out_shown", feeds[1])):
        np.testing.assert_allclose(first_fetch(rewritten, fetch, feed), first_fetch(item, fetch, feed), 1e-12)
    assert_trains_alike(item, [feeds[0] | feeds[1]] * 2, modes=[mode])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_fed_to_an_input_that_nothing_reads_is_ignored(mode: str) -> None:
    def forward() -> Mapping[str, Any]:
        v1.placeholder_with_default(False, (), name="training")
        placeholder("left_over", None, 2)
        return {"loss": tf.reduce_sum(tf.tanh(placeholder("x", None, 4) @ variable("w", W)))}

    item = make_item(forward)
    feed = {"x": X, "training:0": True, "left_over": np.zeros((3, 2))}
    np.testing.assert_allclose(
        train(distributed(item, mode), [feed]).variables["w"], train(item, [{"x": X}]).variables["w"], 1e-12
    )


@pytest.fixture
def meta_graph(tmp_path: Path) -> Path:
    """Write a graph that has ops beside the step: one fills a table, others save and restore."""
    graph = tf.Graph()
    with graph.as_default():
        ids, w = placeholder("ids", None, dtype=tf.int64), variable("w", 2.0)
        pairs = v1.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0], tf.int64, tf.float64)
        table = v1.lookup.StaticHashTable(pairs, 0.0)
        loss = tf.reduce_sum(table.lookup(ids) * w, name="loss")
        tf.group(w.assign_sub(0.1 * v1.gradients(loss, [w])[0]), name="train")
        tf.group(v1.tables_initializer(), name="fill")
        tf.group(v1.global_variables_initializer(), name="init")
        saver = v1.train.Saver([w], name="keeper").as_saver_def()
        v1.train.export_meta_graph(str(tmp_path / "graph.meta"), graph=graph, saver_def=saver)
    return tmp_path / "graph.meta"


@pytest.mark.parametrize("mode", MODES)
def test_what_fills_tables_and_saves_variables_survives(meta_graph: Path, mode: str) -> None:
    item = GraphItem.load(meta_graph, train_op="train", outputs=["loss"], init_op="init")
    place = {"keeper/Const:0": str(meta_graph.parent / "w")}
    with distributed(item, mode).session() as session:
        session.run(["init", *(name for name in item.keep if "key_value_init" in name)])
        loss, _ = session.run(["loss", "train"], {"ids": [1, 2, 5]}, timeout_ms=30000)
        assert loss == 2.0 * (3 + 4)
        session.run("keeper/control_dependency", place)
        saved = session.read_variable("w")
        session.run("train", {"ids": [2]}, timeout_ms=30000)
        assert session.read_variable("w") != saved
        session.run("keeper/restore_all", place)
        assert session.read_variable("w") == saved


@pytest.mark.parametrize("devices", [["CPU:1", "CPU:0"], ["CPU:2", "CPU:0", "CPU:1"]])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_come_back_in_the_order_of_the_examples_whatever_the_order_of_the_devices(
    devices: list[str], mode: str
) -> None:
    item = make_item(two_parts)
    rewritten = ar.rewrite(item, {"devices": devices, "strategy": {"name": "AllReduce", "variables": mode}})
    expected, got = train(item, [{"x": X}] * 2), train(rewritten, [{"x": X}] * 2)
    for one, other in zip(got.fetched, expected.fetched, strict=True):
        np.testing.assert_allclose(one["second"], other["second"], 1e-12)
    np.testing.assert_allclose(got.variables["w"], expected.variables["w"], 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_what_only_orders_the_ops_of_each_replica_does_not_join_the_replicas(mode: str) -> None:
    """TensorFlow's tuples have such NoOps (`group_deps`): one for all would make each replica wait for the others."""

    def forward() -> Mapping[str, Any]:
        x, w = placeholder("x", None, 4), variable("w", W)
        first, second = v1.tuple([tf.tanh(x @ w), x * 2], name="pair")
        return {"loss": tf.reduce_sum(first * second)}

    graph = distributed(make_item(forward), mode).graph
    orders = [node for node in graph if node.op == "NoOp" and "pair" in node.name]
    assert len(orders) == 2
    for node in orders:
        replicas = {other.name.split("/")[0] for other in (*node.controls, *node.control_users)}
        assert len(replicas) == 1, f"{node.name} joins {replicas}"


@pytest.mark.parametrize("strategy", ["AllReduce", "PartitionedPS", "FSDP"])
def test_all_variables_are_read_in_one_run_and_reads_add_nothing_to_the_graph(strategy: str) -> None:
    def forward() -> Mapping[str, Any]:
        return {"loss": tf.reduce_sum(placeholder("x", None, 4) @ variable("w", W) * variable("u", W[0]))}

    item = make_item(forward)
    new = ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy}})
    with new.session() as session:
        session.run(item.init_op)
        size = len(session.graph.get_operations())
        values = session.read_variables()
        np.testing.assert_array_equal(values["w"], W)
        np.testing.assert_array_equal(session.read_variables(["u"])["u"], session.read_variable("u"))
        assert list(values) == list(item.variables)
        assert len(session.graph.get_operations()) == size
        with pytest.raises(ar.GraphError, match="no variable 'ww'") as caught:
            session.read_variables(["ww"])
        assert "closest: w" in str(caught.value)


def test_a_session_of_variables_that_live_in_the_program_is_refused_with_what_trains_them() -> None:
    kept = tf.Variable(W)
    step = tf.function(lambda x: kept.assign_sub(tf.transpose(x) @ x))
    item = GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64))
    for one in (item, distributed(item, "shared")):
        with pytest.raises(ar.GraphError, match=r"a session cannot reach .* live in the program(.|\n)*ar\.function"):
            one.session()
