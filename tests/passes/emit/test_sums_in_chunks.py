"""A sum of very many replicas is taken in chunks of at most 200, and comes to the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.ir.verify.expanded import check_expanded

v1 = tf.compat.v1
ROWS = np.random.default_rng(0).normal(size=(812, 2))


def item() -> GraphItem:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 2], "x")
        w = v1.get_variable("w", initializer=np.ones((2, 1)), use_resource=True)
        loss = tf.reduce_sum(tf.square(x @ w), name="loss")
        v1.train.GradientDescentOptimizer(0.001).minimize(loss, name="train")
        v1.variables_initializer([w], name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def trained(one: GraphItem) -> Any:
    with one.session() as session:
        session.run("init")
        loss, _ = session.run(["loss", "train"], {"x": ROWS})
        return loss, session.read_variable("w")


@pytest.mark.parametrize(
    ("replicas", "micro", "sizes"),
    [(200, 1, [200]), (401, 1, [1, 3, 200, 200]), (201, 2, [1, 2, 200])],
)
def test_no_sum_has_more_than_200_operands(replicas: int, micro: int, sizes: list[int]) -> None:
    given = {"devices": ["CPU:0"] * replicas, "microbatches": micro}
    new = ar.rewrite(item(), given)
    sums = [len(node.inputs) for node in new.graph if node.op == "AddN" and "grad" in node.name.lower()]
    assert sorted(sums) == sizes
    assert all(len(node.inputs) <= 200 for node in new.graph if node.op == "AddN")
    check_expanded(new.graph_bytes, item(), new.report.plan.all_devices, micro=micro)


def test_a_sum_in_chunks_comes_to_the_same() -> None:
    new = ar.rewrite(item(), {"devices": ["CPU:0"] * 201})
    for got, expected in zip(trained(new), trained(item()), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_no_gather_joins_more_than_200_blocks_at_once() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 2], "x")
        w = v1.get_variable("w", initializer=np.ones((2, 1)), use_resource=True)
        rows = tf.identity(x @ w, name="rows")
        v1.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(rows), name="train")
        v1.variables_initializer([w], name="init")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["rows"], init_op="init")
    new = ar.rewrite(item, {"devices": ["CPU:0"] * 401})
    joins = [len(node.inputs) - 1 for node in new.graph if node.op == "ConcatV2" and node.name.startswith("rows")]
    assert sorted(joins) == [3, 200, 200]
    check_expanded(new.graph_bytes, item, new.report.plan.all_devices)
    with new.session() as session:
        session.run("init")
        np.testing.assert_allclose(session.run("rows", {"x": ROWS}), ROWS.sum(1, keepdims=True), rtol=1e-12)
