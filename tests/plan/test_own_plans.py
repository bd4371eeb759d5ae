"""A plan that was made of a configuration can be carried out as it is: it gives the same graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem, Plan

v1 = tf.compat.v1
NODE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
CLUSTER = {"workers": ["127.0.0.1:7001", "127.0.0.1:7002"]}
SERVED = {"cluster": CLUSTER | {"ps": ["127.0.0.1:7003"]}}
WHOLE, SERVERS = ("AllReduce", "FSDP", "PartitionedAR"), ("PS", "PartitionedPS", "UnevenPartitionedPS", "Parallax")
MODEL = {"mesh": {"data": 2, "model": 2}, "devices": [f"CPU:{i}" for i in range(4)]}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": {"name": name}} for name in (*WHOLE, *SERVERS)},
    **{f"{name}, mirrored": {"strategy": {"name": name, "variables": "mirrored"}} for name in WHOLE},
    **{f"{name}, workers": {"strategy": {"name": name}, "cluster": CLUSTER} for name in WHOLE},
    **{f"{name}, servers": {"strategy": {"name": name}, **SERVED} for name in SERVERS},
    **{name: {"strategy": {"compressor": name}} for name in ("fp16", "fp16_ef", "int8_ef", "topk", "powersgd")},
    "local SGD": {"local_sgd": {"period": 3}},
    "local SGD, workers": {"local_sgd": {"period": 3, "warmup_steps": 2}, "cluster": CLUSTER},
    "components": {"variable_policies": [{"match": ".*seen", "synchronization": "on_read", "aggregation": "sum"}]},
    "micro-batches": {"microbatches": 2},
    "micro-batches in a loop": {"microbatches": 2, "accumulation": {"form": "loop"}},
    "stages": {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 2}, "strategy": {"name": "Pipeline"}},
    "recomputed": {"remat": {"policy": "sqrt"}},
    "steps": {"steps_per_run": 3},
    "model axis": {**MODEL, "sharding": [{"match": ".*", "split": [1, 2]}]},
    "model axis, shards": {**MODEL, "sharding": [{"match": ".*", "split": [1, 2]}], "strategy": {"name": "FSDP"}},
}


def config(name: str) -> dict[str, Any]:
    devices = ["CPU:0"] if "cluster" in CONFIGS[name] else ["CPU:0", "CPU:1"]
    return {"devices": devices, **CONFIGS[name]}


def task(name: str) -> dict[str, int]:
    return {"task": 0} if "cluster" in CONFIGS[name] else {}


def function() -> GraphItem:
    w, v, slot, seen = (
        keras.Variable(np.ones((8, 8)), dtype="float64", name=f"_up:0 größe {name}", trainable=name != "seen")
        for name in ("w", "v", "slot", "seen")
    )

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ w) @ v) ** 2)
        first, second = tape.gradient(loss, (w.value, v.value))
        slot.assign(0.9 * slot + first)
        seen.assign_add(tf.matmul(x, x, transpose_a=True))
        w.assign_sub(0.1 * slot)
        v.assign_sub(0.1 * second)
        return loss

    return GraphItem.from_function(step, tf.TensorSpec([None, 8], tf.float64, name="x"))


def graph() -> GraphItem:
    with tf.Graph().as_default() as made:
        x = v1.placeholder(tf.float64, [None, 8], "x")
        w, v = (v1.get_variable(one, initializer=np.ones((8, 8)), use_resource=True) for one in "wv")
        slot = v1.get_variable("slot", initializer=np.zeros((8, 8)), use_resource=True, trainable=False)
        loss = tf.reduce_mean((tf.tanh(x @ w) @ v) ** 2, name="loss")
        first, second = tf.gradients(loss, [w, v])
        tf.group(w.assign_sub(0.1 * slot.assign(0.9 * slot + first)), v.assign_sub(0.1 * second), name="train")
        v1.variables_initializer([w, v, slot], name="init")
    return GraphItem.from_graph(made, train_op="train", outputs=["loss"], init_op="init")


IN_SESSIONS = [name for name in CONFIGS if "servers" in name or "workers" in name or name == "local SGD"]


@pytest.mark.parametrize(
    ("make", "name"), [*((function, name) for name in CONFIGS), *((graph, name) for name in IN_SESSIONS)]
)
def test_the_plan_of_a_configuration_gives_its_graph(make: Callable[[], GraphItem], name: str) -> None:
    item = make()
    expected = ar.rewrite(item, config(name), **task(name)).graph_def
    plan = ar.build_plan(item, config(name))
    assert plan.edges, "or nothing is compared"
    assert ar.rewrite(item, Plan.from_yaml(plan.to_yaml()), **task(name)).graph_def == expected
    # Some nodes are named after variables, whose names may hold anything.
    assert [node.name for node in expected.node if not NODE_NAME.fullmatch(node.name)] == []
