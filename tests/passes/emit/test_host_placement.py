"""Graphs for GPUs compute the same numbers: run on CPUs that stand in for them, with the host apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.inspect.accelerator import accelerator_use
from tests.zoo import ZOO, Built

SIZES = (6, 5)


def trained(graph: bytes, built: Built) -> list[Any]:
    """What some steps of a graph give."""
    with tf.Graph().as_default() as new:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph), name="")
    outputs: list[Any] = []
    with tf.compat.v1.Session(graph=new) as session:
        session.run(built.init_op)
        for step, batch in enumerate(SIZES):
            outputs += session.run([*built.outputs, built.train_op], built.feeds(step, batch))[:-1]
    return outputs


def stand_ins(graph: bytes, count: int) -> bytes:
    """A graph with the CPU devices behind the first in the place of GPUs; their names are equally long."""
    for i in range(count):
        graph = graph.replace(f"/device:GPU:{i}".encode(), f"/device:CPU:{i + 1}".encode())
    assert b"GPU" not in graph
    return graph


@pytest.mark.parametrize("variables", ["mirrored", "shared"])
@pytest.mark.parametrize("model", ["mlp", "language_model", "masked", "transformer"])
def test_a_graph_for_gpus_computes_what_one_device_computes(model: str, variables: str) -> None:
    built = ZOO[model].build(optimizer="sgd")
    config = {"devices": ["GPU:0", "GPU:1"], "strategy": {"name": "AllReduce", "variables": variables}}
    new = ar.rewrite(built.item(), config)
    # Both replicas exchange by the rings of TensorFlow, which know CPUs only.
    actual = trained(stand_ins(new.graph_bytes, 2), built)
    same(actual, trained(built.graph.as_graph_def().SerializeToString(), built))


@pytest.mark.parametrize("model", ["lstm_v1", "lstm_v2", "gru_v1", "gru_v2"])
def test_replicas_on_several_gpus_share_the_variables_of_a_loop(model: str) -> None:
    built = ZOO[model].build(optimizer="sgd")
    config = {"devices": ["GPU:0", "GPU:1"], "strategy": {"name": "AllReduce", "variables": "shared"}}
    new = ar.rewrite(built.item(), config)
    actual = trained(stand_ins(new.graph_bytes, 2), built)
    same(actual, trained(built.graph.as_graph_def().SerializeToString(), built))


def test_what_a_loop_keeps_on_the_host_is_measured_there() -> None:
    item = ZOO["lstm_v1"].build(dtype="float32").item()
    config = {"devices": ["GPU:0", "GPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
    added = [one for one in accelerator_use(ar.rewrite(item, config), item).moved if one.added]
    assert added
    assert [one.value for one in added if not one.why] == []


def same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, two in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)


def test_constants_that_only_servers_read_are_on_the_host() -> None:
    item = ZOO["masked"].build(dtype="float32").item()
    config = {"devices": ["GPU:0", "GPU:1"], "strategy": {"name": "PS", "variables": "mirrored"}}
    moved = accelerator_use(ar.rewrite(item, config), item).moved
    assert [one.value for one in moved if one.op == "Const" and one.added] == []
