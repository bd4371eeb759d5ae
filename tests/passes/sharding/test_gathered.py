"""The best of classes that are cut come from candidates; what gathers blocks is told; tied tables are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.passes.sharding import placements

WIDTH, CLASSES = 4, 16
MESHES = {
    "two devices": {"devices": ["CPU:0", "CPU:1"], "mesh": {"model": 2}},
    "two replicas of two": {"devices": [f"CPU:{i}" for i in range(4)], "mesh": {"data": 2, "model": 2}},
}
COLUMNS = {"sharding": [{"match": "w", "split": [1, "model"]}]}


def classifier(metric: Callable[[Any, Any], Any], dtype: Any = tf.float64) -> ar.GraphItem:
    """Return the item of a step of a classifier with a metric of logits and labels among its outputs."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(WIDTH, CLASSES)), name="w", dtype=dtype)

    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = x @ w
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, metric(logits, labels)

    return ar.GraphItem.from_function(step, tf.TensorSpec([None, WIDTH], dtype), tf.TensorSpec([None], tf.int32))


def feeds(dtype: str = "float64", *, ties: bool = False) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    made = rng.integers(-1, 2, (3, 8, WIDTH)) if ties else rng.normal(size=(3, 8, WIDTH))
    return [{"x": x.astype(dtype), "labels": rng.integers(0, CLASSES, 8).astype(np.int32)} for x in made]


def gathered(item: ar.GraphItem, config: Any) -> list[str]:
    """Return the notes of what reads blocks whole."""
    return [note for note in ar.rewrite(item, config).report.plan.notes if "whole, of which each device" in note]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("ties", [True, False])
def test_the_best_classes_come_from_the_candidates_of_each_device(k: int, mesh: str, ties: bool) -> None:
    item, config = classifier(lambda logits, _: tf.nn.top_k(tf.round(logits), k)), {**MESHES[mesh], **COLUMNS}
    edges = ar.rewrite(item, config).report.plan.model_edges
    assert {edge.value for edge in edges if edge.lowering == "concat"} == {"TopKV2/candidates", "TopKV2/classes"}
    report = ar.verify(item, config, feeds=feeds(ties=ties))
    assert report.ok, report


@pytest.mark.parametrize("mesh", MESHES)
def test_a_label_is_among_the_best_as_on_one_device(mesh: str) -> None:
    item = classifier(lambda logits, labels: tf.math.in_top_k(labels, logits, 3), tf.float32)
    config = {**MESHES[mesh], **COLUMNS}
    assert not gathered(item, config)
    report = ar.verify(item, config, feeds=feeds("float32", ties=True))
    assert report.ok, report


def test_what_is_no_label_or_no_number_is_among_none() -> None:
    def metric(logits: Any, labels: Any) -> Any:
        odd = tf.where(logits > 1.0, np.inf, logits)
        return tf.math.in_top_k(labels, odd, 3), tf.math.in_top_k(labels + CLASSES, logits, CLASSES)

    item = classifier(metric, tf.float32)
    report = ar.verify(item, {**MESHES["two devices"], **COLUMNS}, feeds=feeds("float32"))
    assert report.ok, report


@pytest.mark.parametrize(
    ("metric", "op"),
    [
        (lambda logits, _: tf.nn.top_k(logits, CLASSES // 2), "TopKV2"),
        (lambda logits, _: tf.cumsum(logits, 1), "Cumsum"),
        (lambda logits, _: logits[:, ::-1], "ReverseV2|StridedSlice"),
        (lambda logits, _: tf.sort(logits), "TopKV2"),
    ],
)
def test_whoever_reads_blocks_whole_is_named(metric: Callable[[Any, Any], Any], op: str) -> None:
    item, config = classifier(metric), {**MESHES["two devices"], **COLUMNS}
    (note,) = gathered(item, config)
    assert any(f"model axis: {one} " in note for one in op.split("|"))
    assert ar.verify(item, config).ok


def tied() -> ar.GraphItem:
    """Return the item of a model whose table is looked up, and is its head."""
    table = tf.Variable(np.random.default_rng(0).normal(size=(CLASSES, WIDTH)), name="table")

    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.nn.embedding_lookup(table, ids))
            logits = tf.matmul(hidden, table, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    spec = tf.TensorSpec([None], tf.int32)
    return ar.GraphItem.from_function(step, spec, spec)


@pytest.mark.parametrize("mesh", MESHES)
def test_no_device_has_the_whole_gradient_of_a_tied_table(mesh: str) -> None:
    config = {**MESHES[mesh], "sharding": [{"match": "table", "split": ["model", 1]}]}
    item = tied()
    new = ar.rewrite(item, config)
    sums = [node for node in new.graph_def.node if node.op == "UnsortedSegmentSum"]
    assert {node.device[-1] for node in sums} == set("0123"[: len(config["devices"])])
    summed = {edge.value for edge in new.report.plan.model_edges if edge.lowering == "add_n"}
    assert "gradient_tape/embedding_lookup/Reshape" in summed  # a row for each token, not for each word
    assert not any(value.startswith("AddN") for value in summed)
    rng = np.random.default_rng(0)
    fed = [{name: rng.integers(0, CLASSES, 8).astype(np.int32) for name in ("ids", "labels")} for _ in range(3)]
    report = ar.verify(item, config, feeds=fed)
    assert report.ok, report
    assert placements.SEGMENT_SUM == "UnsortedSegmentSum"
