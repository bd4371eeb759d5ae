"""What reads and writes a replica's own variable keeps its order on every replica, not only on the first.

An order may lead through a node that exists once and reads replica 0's value: that says nothing about the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, ONCE, Select
from autograph_rewrite.ir.traversal import marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.ops.traits import READS
from tests.support.rewriting import run_pipeline
from tests.support.training import v1
from tests.zoo import ZOO, Options

MIRRORED = {"devices": [f"CPU:{i}" for i in range(4)], "strategy": {"name": "AllReduce", "variables": "mirrored"}}


def lost(graph: Graph) -> list[tuple[str, str]]:
    """Return the accesses that follow each other in the folded graph, and need not on replicas other than the first."""
    order = topological_order(graph)
    accesses = [node for node in order if node.span == EACH and (is_update(node) or node.op in READS)]
    marks = {node: 1 << i for i, node in enumerate(accesses)}
    before, sound = marks_before(order, marks), _soundly_before(order, marks)
    found = []
    for i, one in enumerate(accesses):
        for other in accesses[i + 1 :]:
            if not (is_update(one) or is_update(other)) or not _handles(one) & _handles(other):
                continue
            for first, then in ((one, other), (other, one)):
                if before[then] & marks[first] and not sound[then] & marks[first]:
                    found.append((first.name, then.name))
    return found


def _handles(node: Node) -> set[Node]:
    return {handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE}


def _soundly_before(order: list[Node], marks: Mapping[Node, int]) -> dict[Node, int]:
    found: dict[Node, int] = {}
    for _ in range(3):  # what leaves a loop has gone through what its last iteration ran
        for node in order:
            mask = 0
            for producer in _awaited_on_every_replica(node):
                mask |= found.get(producer, 0) | marks.get(producer, 0)
            found[node] = mask
    return found


def _awaited_on_every_replica(node: Node) -> Iterator[Node]:
    for index, value in enumerate(node.inputs):
        if node.span == EACH or value.node.span == ONCE or node.selects.get(index) is Select.ALL:
            yield value.node
    yield from node.controls


def folded(item: Any, config: Mapping[str, Any]) -> Graph:
    found: list[Graph] = []

    def observe(name: str, graph: Graph) -> None:
        if name == "order-accesses":
            found.append(graph.clone())

    flat = normalise(item)
    run_pipeline(flat, ar.build_plan(flat, config), observers=[observe])
    return found[-1]


def overwriting() -> ar.GraphItem:
    """A model of which every second step writes the average of a weight over it, in a branch."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float64, (None, 3), name="x")
        w = v1.get_variable("w", initializer=np.ones((3, 1)), use_resource=True)
        average = v1.get_variable("average", initializer=np.zeros((3, 1)), use_resource=True, trainable=False)
        step = v1.get_variable("step", initializer=np.int64(0), use_resource=True, trainable=False)
        loss = tf.reduce_mean((x @ w - 1) ** 2, name="loss")
        trained = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([trained]):
            averaged = average.assign(0.5 * average.read_value() + 0.5 * w.read_value())
            counted = step.assign_add(1)
        with tf.control_dependencies([averaged, counted]):
            is_second = tf.equal(counted % 2, 0)
            tf.cond(is_second, lambda: tf.group(w.assign(average.read_value())), tf.no_op, name="overwrite")
        train = graph.get_operation_by_name("overwrite")
        tf.group(train, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def test_a_branch_that_overwrites_a_variable_waits_for_the_update_of_its_own_replica() -> None:
    assert lost(folded(overwriting(), MIRRORED)) == []


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.kind == "graph"])
def test_accesses_keep_their_order_in_the_zoo(name: str) -> None:
    item = ZOO[name].build(Options(optimizer="adam", dtype="float32")).item()
    assert lost(folded(item, MIRRORED)) == []


def test_averages_that_keras_writes_over_the_weights_equal_one_device() -> None:
    def weights(distribute: bool) -> list[Any]:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((12,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)
        model.compile(optimizer=optimizer, loss="mse")
        random = np.random.default_rng(3)
        x, y = random.normal(size=(24, 12)), random.normal(size=(24, 3))
        (ar.distribute(model, MIRRORED) if distribute else model).fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
        return [np.asarray(weight) for weight in (*model.weights, *model.optimizer.variables)]

    for one, other in zip(weights(False), weights(True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
