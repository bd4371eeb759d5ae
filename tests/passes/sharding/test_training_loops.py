"""Loops that train within one step: each iteration reads shards or blocks of variables, gathers and writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar

EXACT = 1e-9
FSDP = {"strategy": {"name": "FSDP", "variables": "mirrored"}}
MEGATRON = [{"match": "w", "split": [1, 2]}, {"match": "u", "split": [2, 1]}]
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp": {**FSDP, "devices": ["CPU:0", "CPU:1", "CPU:2"]},
    "zero 1": {
        "devices": ["CPU:0", "CPU:1"],
        "strategy": {"variables": "mirrored"},
        "variables": [{"match": ".*", "partition": {"over": "data", "stage": 1}}],
    },
    "servers": {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "PartitionedPS", "variables": "mirrored"}},
    "uneven shards": {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "UnevenPartitionedPS"}},
    "model axis": {"devices": ["CPU:0", "CPU:1"], "mesh": {"data": 1, "model": 2}, "sharding": MEGATRON},
    "both axes": {
        **FSDP,
        "devices": ["CPU:0", "CPU:1", "CPU:2", "CPU:3"],
        "mesh": {"data": 2, "model": 2},
        "sharding": MEGATRON,
    },
}


def _variable(name: str, *shape: int) -> tf.Variable:
    content = np.random.default_rng(len(name) + sum(shape)).normal(size=shape) / 2
    return tf.Variable(content, name=name, trainable=name != "ema")


def _descent(w: tf.Variable, u: tf.Variable, x: Any, y: Any) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.tanh(x @ w) @ u - y) ** 2)
    return loss, tape.gradient(loss, [w, u])


def rows() -> Callable[..., Any]:
    w, u = _variable("w", 8, 4), _variable("u", 4, 2)

    def step(x: Any, y: Any) -> Any:
        ids = tf.range(tf.shape(x)[0]) % 8
        total = tf.zeros((), tf.float64)
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(tf.gather(w, ids) * x) @ u - y) ** 2)
            table, matrix = tape.gradient(loss, [w, u])
            w.scatter_sub(tf.IndexedSlices(0.1 * table.values, table.indices))
            u.assign_sub(0.1 * matrix)
            total += loss
        return total

    return step


def nested() -> Callable[..., Any]:
    w, u = _variable("w", 4, 6), _variable("u", 6, 2)

    def step(x: Any, y: Any) -> Any:
        total = tf.zeros((), tf.float64)
        for _ in tf.range(2):
            for _ in tf.range(2):
                loss, (dw, du) = _descent(w, u, x, y)
                w.assign_sub(0.1 * dw)
                u.assign_sub(0.1 * du)
                total += loss
            total += tf.reduce_sum(w)
        return total

    return step


def branches() -> Callable[..., Any]:
    w, u = _variable("w", 4, 6), _variable("u", 6, 2)

    def step(x: Any, y: Any) -> Any:
        total = tf.zeros((), tf.float64)
        for i in tf.range(3):
            loss, (dw, du) = _descent(w, u, x, y)
            if i % 2 == 0:
                w.assign_sub(0.1 * dw)
            else:
                w.assign(0.9 * (w - 0.2 * dw))
            u.assign_sub(0.1 * du)
            total += loss
        return total

    return step


def critic() -> Callable[..., Any]:
    w, u = _variable("w", 4, 6), _variable("u", 6, 2)

    def step(x: Any, y: Any) -> Any:
        for _ in tf.range(3):
            w.assign_sub(0.1 * _descent(w, u, x, y)[1][0])
        loss, (dw, du) = _descent(w, u, x, y)
        w.assign_sub(0.1 * dw)
        u.assign_sub(0.1 * du)
        return loss

    return step


def slices() -> Callable[..., Any]:
    w, u = _variable("w", 4, 6), _variable("u", 6, 2)

    def step(x: Any, y: Any) -> Any:
        total = tf.zeros((), tf.float64)
        for _ in tf.range(3):
            loss = _descent(w, u, x, y)[0]
            w[1:3].assign(0.5 * w[1:3] + 0.1 * loss)
            u.scatter_nd_update([[0, 1]], [0.1 * loss])
            total += loss
        return total

    return step


def until_it_is_good() -> Callable[..., Any]:
    w, u = _variable("w", 4, 6), _variable("u", 6, 2)

    def step(x: Any, y: Any) -> Any:
        loss, i = tf.constant(9.0, tf.float64), tf.constant(0)
        while loss > 0.8 and i < 4:
            loss, (dw, du) = _descent(w, u, x, y)
            w.assign_sub(0.1 * dw)
            u.assign_sub(0.1 * du)
            i += 1
        return loss

    return step


def carried_momentum() -> Callable[..., Any]:
    w, u = _variable("w", 4, 6), _variable("u", 6, 2)

    def step(x: Any, y: Any) -> Any:
        momentum, total = tf.zeros((4, 6), tf.float64), tf.zeros((), tf.float64)
        for _ in tf.range(3):
            loss, (dw, du) = _descent(w, u, x, y)
            momentum = 0.9 * momentum + dw
            w.assign_sub(0.1 * momentum)
            u.assign_sub(0.1 * du)
            total += loss
        return total

    return step


def clipped_with_averages() -> Callable[..., Any]:
    w, u, ema = _variable("w", 4, 6), _variable("u", 6, 2), _variable("ema", 4, 6)

    def step(x: Any, y: Any) -> Any:
        total = tf.zeros((), tf.float64)
        for _ in tf.range(3):
            loss, gradients = _descent(w, u, x, y)
            (dw, du), _ = tf.clip_by_global_norm(gradients, 0.3)
            w.assign_sub(0.1 * dw)
            u.assign_sub(0.1 * du)
            ema.assign(0.9 * ema + 0.1 * w)
            total += loss
        return total + tf.reduce_sum(ema)

    return step


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (rows, "servers"),
        (rows, "both axes"),
        (nested, "fsdp"),
        (branches, "both axes"),
        (critic, "zero 1"),
        (slices, "both axes"),
        (slices, "model axis"),
        (until_it_is_good, "uneven shards"),
        (carried_momentum, "fsdp"),
        (clipped_with_averages, "both axes"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_loop_that_trains_computes_what_one_device_does(make: Callable[[], Callable[..., Any]], config: str) -> None:
    specs = tf.TensorSpec([None, 4], tf.float64, "x"), tf.TensorSpec([None, 2], tf.float64, "y")
    item = ar.GraphItem.from_function(make(), *specs)
    new = ar.rewrite(item, CONFIGS[config])
    assert new.variables["w"].shards is not None
    report = ar.verify(item, CONFIGS[config])
    assert report.ok, report
    assert max(row.error for row in report.rows) <= EXACT


def test_an_optimizer_in_a_loop_computes_on_shards_and_gathers_nothing_of_its_state() -> None:
    w, m = _variable("w", 4, 6), tf.Variable(np.zeros((4, 6)), name="m", trainable=False)

    def step(x: Any) -> Any:
        total = tf.zeros((), tf.float64)
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
            m.assign(0.9 * m + tape.gradient(loss, w))
            w.assign_sub(0.1 * m)
            total += loss
        return total

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64, "x"))
    new = ar.rewrite(item, {**FSDP, "devices": ["CPU:0", "CPU:1"]})
    assert set(new.report.held.values()) == {w.numpy().nbytes}  # half of both
    owners = {edge.owner for edge in new.report.plan.edges if "gather" in edge.lowering}
    assert owners == {"w"}
    assert any(edge.lowering == "reduce_scatter" for edge in new.report.plan.edges)
