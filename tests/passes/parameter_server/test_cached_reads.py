"""Copies of what servers hold: each worker of a function has one of what it reads as a whole, of a table none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.verify.ranks import verify_ranks
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.runtime.function.session_step import stand_alone, with_proxies
from autograph_rewrite.strategies import builder_for
from tests.support.rewriting import run_pipeline

WRITTEN = "autograph_written/Gather/resource"
IDS = tf.TensorSpec([None, 3], tf.int64)


def graphs(reads: str, ranks: int = 2, **more: Any) -> list[Graph]:
    """Return the graphs of each rank of a function that looks rows up, and reads them in another way, too."""
    rows, w = tf.Variable(np.ones([6, 2], np.float32), name="rows"), tf.Variable(np.ones([2, 1], np.float32), name="w")

    def step(ids: Any) -> Any:
        scale = tf.ones([1, 2])
        if reads == "in a branch":
            scale = tf.cond(tf.reduce_sum(w) > 0, lambda: tf.gather(rows, [0]), lambda: scale)
        with tf.GradientTape() as tape:
            found = tf.gather(rows, ids)
            if reads == "as a whole":
                found += tf.reduce_mean(rows)
            found *= scale
            loss = tf.reduce_sum(tf.tensordot(found, w, 1) ** 2)
        of_rows, of_w = tape.gradient(loss, [rows, w])
        rows.assign_sub(tf.convert_to_tensor(of_rows))
        w.assign_sub(of_w)
        return loss

    flat = normalise(stand_alone(ar.GraphItem.from_function(step, IDS, batch_inputs={"ids": 0})))
    cluster = {"workers": [f"127.0.0.1:1{i}" for i in range(ranks)], "ps": ["127.0.0.1:20"]}
    config = Config.of({"devices": ["CPU:0"], "cluster": cluster, "strategy": {"name": "PS"}, **more})
    plan = with_proxies(builder_for(config).build(flat, config))
    return [serde.from_bytes(run_pipeline(flat, plan, task=rank).graph_bytes) for rank in range(ranks)]


def copies(graph: Graph) -> int:
    return sum(node.op == "VarHandleOp" and node.name.endswith("/proxy") for node in graph)


def test_rows_are_looked_up_where_they_are_and_the_rest_is_read_from_a_copy() -> None:
    found = graphs("rows")
    for graph in found:
        (lookup,) = (node for node in graph if node.op == "ResourceGather")
        assert "/job:ps" in lookup.device
        assert copies(graph) == 1
    verify_ranks(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lookup_waits_for_worker_0_if_the_program_has_written_the_table_since_the_last_step(rank: int) -> None:
    graph = graphs("rows")[rank]
    (lookup,) = (node for node in graph if node.op == "ResourceGather")
    (merged,) = (control for control in lookup.controls if control.name.startswith(WRITTEN))
    free, waited = (value.node for value in merged.inputs)
    assert merged.op == "Merge"
    assert not free.controls
    assert [value.node.op for value in (*free.inputs, *waited.inputs)] == ["Switch", "Switch"]
    assert [free.inputs[0].index, waited.inputs[0].index] == [0, 1]
    flag = free.inputs[0].node.inputs[1].node
    assert flag.op == "Placeholder"
    tokens = [node.op for node in ancestors(waited.controls) if "token" in node.name]
    assert ("QueueEnqueueManyV2" if rank == 0 else "QueueDequeueV2") in tokens


@pytest.mark.parametrize("reads", ["as a whole", "in a branch"])
def test_a_table_that_is_read_in_another_way_has_a_copy(reads: str) -> None:
    for graph in graphs(reads):
        assert copies(graph) == 2
        assert not [node for node in graph if node.name.startswith(WRITTEN)]


def test_one_worker_has_nobody_to_wait_for() -> None:
    (graph,) = graphs("rows", ranks=1)
    assert not [node for node in graph if node.name.startswith(WRITTEN)]


def test_workers_that_do_not_wait_for_each_other_have_a_copy() -> None:
    for graph in graphs("rows", variables=[{"match": ".*", "synchronizer": "ps", "sync": False}]):
        assert copies(graph) == 2
