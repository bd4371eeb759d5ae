"""A product [8, 6] x [6, 4] on two devices: split by rows, by columns or along the contraction, it is the dense one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar

LEFT, RIGHT = (np.random.default_rng(i).normal(size=shape) for i, shape in enumerate([(8, 6), (6, 4)]))
TWO = {"devices": ["CPU:0", "CPU:1"], "mesh": {"model": 2}}
SPLITS: dict[str, tuple[dict[str, list[int]], tuple[str, str]]] = {
    "rows": ({"left": [2, 1]}, ("split(0)", "concat")),
    "columns": ({"right": [1, 2]}, ("split(1)", "concat")),
    "contraction": ({"left": [1, 2], "right": [2, 1]}, ("partial(sum)", "add_n")),
}


def item() -> ar.GraphItem:
    """Return the item of a step that gives the product of two variables, and updates them."""
    left, right = tf.Variable(LEFT, name="left"), tf.Variable(RIGHT, name="right")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            product = tf.matmul(left, right, name="product")
            loss = tf.reduce_mean(tf.matmul(x, product) ** 2)
        for variable, gradient in zip((left, right), tape.gradient(loss, (left, right)), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss, product

    return ar.GraphItem.from_function(step, tf.TensorSpec([None, 8], tf.float64))


def config(split: dict[str, list[int]]) -> dict[str, Any]:
    return {**TWO, "sharding": [{"match": name, "split": dims} for name, dims in split.items()]}


@pytest.mark.parametrize("name", SPLITS)
def test_the_product_equals_the_dense_one_on_two_devices(name: str) -> None:
    split, joined = SPLITS[name]
    new = ar.rewrite(item(), config(split))
    parts = [node for node in new.graph_def.node if node.op == "MatMul" and "product/part" in node.name]
    assert {node.device[-5:] for node in parts} == {"CPU:0", "CPU:1"}
    assert joined in {(edge.from_, edge.lowering) for edge in new.report.plan.model_edges}
    report = ar.verify(item(), config(split))
    assert report.ok, report
    assert max(row.error for row in report.rows) <= 1e-12
