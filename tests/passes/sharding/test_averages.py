"""The average of a variable is cut with it, wherever it is computed without a server, and begins as its value."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.ir.traversal import ancestors
from tests.support.training import control_flow

v1 = tf.compat.v1
FOUR = [f"CPU:{i}" for i in range(4)]
MESH = {"devices": FOUR, "mesh": {"data": 2, "model": 2}}
CUT = [{"match": "w", "split": [1, 2]}, {"match": "u", "split": [2, 1]}]
CONFIGS: dict[str, dict[str, Any]] = {
    "FSDP": {"devices": FOUR[:2], "strategy": {"name": "FSDP"}},
    "FSDP, mirrored": {"devices": FOUR[:3], "strategy": {"name": "FSDP", "variables": "mirrored"}},
    "PartitionedAR": {"devices": FOUR[:2], "strategy": {"name": "PartitionedAR"}},
    "model axis": {**MESH, "sharding": CUT},
    "model axis, mirrored": {**MESH, "sharding": CUT, "strategy": {"variables": "mirrored"}},
}
WHOLE = {"PartitionedPS": {"devices": FOUR[:2], "strategy": {"name": "PartitionedPS"}}}


@lru_cache
def averaged(version: int) -> GraphItem:
    """Return two layers with the averages of TensorFlow 1, whose initial values are conditional."""
    with tf.Graph().as_default() as graph, control_flow(version):
        x = v1.placeholder(tf.float64, [None, 6], "x")
        w, u = (v1.get_variable(n, initializer=np.linspace(-1, 1, 36).reshape(6, 6), use_resource=True) for n in "wu")
        loss = tf.reduce_mean((tf.tanh(x @ w) @ u) ** 2, name="loss")
        descent = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([descent]):
            tf.group(v1.train.ExponentialMovingAverage(0.9).apply([w, u]), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", [*CONFIGS, *WHOLE])
def test_an_average_is_cut_with_its_variable_and_trains_as_on_one_device(name: str, version: int) -> None:
    item, config = averaged(version), (CONFIGS | WHOLE)[name]
    variables = ar.rewrite(item, config).variables
    for one in "wu":
        shards = variables[one].shards
        assert shards is not None
        kept = variables[f"{one}/ExponentialMovingAverage"].shards
        assert (None if kept is None else kept.sizes) == (None if name in WHOLE else shards.sizes)
    report = ar.verify(item, config, steps=3)
    assert report.ok, str(report)


def test_an_average_begins_as_its_variable_once_all_shards_of_it_have_a_value() -> None:
    """Asked of the first shard only, the initialiser would read the others before they are written."""
    graph = ar.rewrite(averaged(1), WHOLE["PartitionedPS"]).graph
    asked = [one for one in ancestors([graph.node("cond/pred_id")]) if one.op == "VarIsInitializedOp"]
    assert sorted(one.inputs[0].name for one in asked) == ["w/part_0", "w/part_1"]


def test_an_average_moves_nothing() -> None:
    edges = ar.rewrite(averaged(2), CONFIGS["FSDP"]).report.plan.edges
    initial = ("Initializer", "VarIsInitializedOp", "cond")
    gathered = [edge.value for edge in edges if edge.lowering == "all_gather" and not edge.value.startswith(initial)]
    assert len(gathered) == 4  # w and u, forward and again for the gradients


@pytest.mark.parametrize("every", [None, 2])
def test_the_average_of_a_keras_optimizer_is_cut(every: int | None) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)])
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=every)
    model.compile(optimizer, "mse")
    item = GraphItem.from_keras(model, tf.TensorSpec([None, 8]), tf.TensorSpec([None, 4]))
    variables = ar.rewrite(item, CONFIGS["FSDP"]).variables
    averages = [one for name, one in variables.items() if name.endswith("kernel_average")]
    assert [one.shards is not None for one in averages] == [True, True]
    report = ar.verify(item, CONFIGS["FSDP"], steps=3)
    assert report.ok, str(report)


def test_what_something_else_reads_is_no_average() -> None:
    """An earlier value of the weights that the loss reads stays whole: each replica needs it in each step."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 6], "x")
        start = np.linspace(-1, 1, 36).reshape(6, 6)
        w = v1.get_variable("w", initializer=start, use_resource=True)
        target = v1.get_variable("target", initializer=start, use_resource=True, trainable=False)
        loss = tf.reduce_mean((x @ w - tf.tanh(x @ target)) ** 2, name="loss")
        descent = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([descent]):
            tf.group(target.assign(0.9 * target + 0.1 * w.read_value()), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")
    variables = ar.rewrite(item, CONFIGS["FSDP"]).variables
    assert variables["w"].shards is not None
    assert variables["target"].shards is None
    report = ar.verify(item, CONFIGS["FSDP"], steps=3)
    assert report.ok, str(report)
