"""Graphs for GPUs compute the same numbers: run on CPUs that stand in for them, with the host apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
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


def same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, two in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)
