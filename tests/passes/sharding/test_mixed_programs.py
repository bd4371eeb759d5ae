"""Programs in which the model axis meets other things: shards over replicas, tables on two axes, lists of loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar

STEPS, EXAMPLES, TIME, WIDTH, WORDS = 3, 6, 3, 8, 6
Variables = Mapping[str, tf.Variable]
Forward = Callable[[Variables, Any], Any]


def made(name: str, *shape: int) -> tf.Variable:
    seed = sum(map(ord, name))
    return tf.Variable(np.random.default_rng(seed).normal(size=shape) / 2, name=name, dtype=tf.float64)


def layers(v: Variables, ids: Any) -> Any:
    return tf.nn.relu(tf.gather(v["table"], ids) @ v["up"]) @ v["head"]


def recurrent(v: Variables, ids: Any) -> Any:
    inputs = tf.transpose(tf.gather(v["table"], ids), [1, 0, 2])
    first = tf.zeros_like(inputs[0])
    return tf.scan(lambda state, x: tf.tanh(x @ v["up"] + state @ v["head"]), inputs, initializer=first)


def attention(v: Variables, ids: Any) -> Any:
    h = tf.gather(v["table"], ids)
    q, k = (tf.einsum("btd,dnk->btnk", h, v[name]) for name in ("query", "key"))
    weights = tf.nn.softmax(tf.einsum("btnk,bsnk->bnts", q, k))
    return h + tf.einsum("btnk,nkd->btd", tf.einsum("bnts,bsnk->btnk", weights, k), v["out"])


def dense() -> Variables:
    return {"table": made("table", WORDS, WIDTH), "up": made("up", WIDTH, WIDTH), "head": made("head", WIDTH, WIDTH)}


def heads() -> Variables:
    shapes = {"query": (WIDTH, 2, 2), "key": (WIDTH, 2, 2), "out": (2, 2, WIDTH)}
    return {"table": made("table", WORDS, WIDTH), **{name: made(name, *shape) for name, shape in shapes.items()}}


def step_of(v: Variables, forward: Forward) -> Callable[[Any], Any]:
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(forward(v, ids) ** 2, -1))
        for variable, gradient in zip(v.values(), tape.gradient(loss, list(v.values())), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def on(data: int, model: Any, sharding: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(data * int(np.prod(model)))]
    entries = [{"match": name, **entry} for name, entry in sharding.items()]
    return {"devices": devices, "mesh": {"data": data, "model": model}, "sharding": entries, **more}


COLUMNS = {"up": {"split": [1, 2]}}
PROGRAMS: dict[str, tuple[Callable[[], Variables], Forward, dict[str, Any]]] = {
    "ZeRO beside blocks": (dense, layers, on(2, 2, COLUMNS, strategy={"name": "FSDP"})),
    "ZeRO beside blocks, mirrored": (
        dense,
        layers,
        on(2, 2, COLUMNS, strategy={"name": "FSDP", "variables": "mirrored"}),
    ),
    "shards beside blocks": (dense, layers, on(2, 2, COLUMNS, strategy={"name": "PartitionedAR"})),
    "shards on the CPU beside blocks of two axes": (
        dense,
        layers,
        on(1, [2, 2], {"up": {"axes": [0, 1]}}, strategy={"name": "PartitionedPS"}),
    ),
    "a table in rows and columns": (dense, layers, on(1, [2, 2], {"table": {"axes": [0, 1]}})),
    "a table in rows and columns, two replicas": (dense, layers, on(2, [2, 2], {"table": {"axes": [0, 1]}})),
    "a loop over a list": (dense, recurrent, on(1, 2, {"up": {"split": [2, 1]}})),
    "a loop whose weights are in blocks": (
        dense,
        recurrent,
        on(1, [2, 2], {"up": {"axes": [0, -1]}, "head": {"split": [1, 4]}}),
    ),
    "names that two axes take": (
        heads,
        attention,
        on(
            1,
            [2, 2],
            {"query": {"axes": [0, -1, 1]}, "key": {"axes": [-1, 0, -1]}, "out": {"split": [1, 1, 4]}},
        ),
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_function_trains_as_on_one_device(program: str) -> None:
    variables, forward, config = PROGRAMS[program]
    alone, cut = variables(), variables()
    spec = tf.TensorSpec([None, TIME], tf.int32)
    one, many = tf.function(step_of(alone, forward)), ar.distribute(step_of(cut, forward), config, spec)
    for step in range(STEPS):
        ids = np.random.default_rng(step).integers(0, WORDS, (EXAMPLES + step, TIME)).astype(np.int32)
        np.testing.assert_allclose(many(ids).numpy(), one(tf.constant(ids)).numpy(), rtol=1e-9)
    for name, variable in alone.items():
        np.testing.assert_allclose(cut[name].numpy(), variable.numpy(), rtol=1e-8, atol=1e-10)


def test_an_exchange_is_told_of_a_value_that_there_is() -> None:
    variables, forward, config = PROGRAMS["names that two axes take"]
    spec = tf.TensorSpec([None, TIME], tf.int32)
    new = ar.rewrite(ar.GraphItem.from_function(step_of(variables(), forward), spec), config)
    assert new.report.plan.model_edges
    assert all(edge.value for edge in new.report.plan.model_edges)
