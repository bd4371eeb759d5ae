"""What a program says of its own tensors is read from the graph: split, replicate and assign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from tests.support import split_models as models

MESH = {"devices": ["CPU:0", "CPU:1"], "mesh": {"data": 1, "model": 2}}
FIRST, SECOND = (np.random.default_rng(i).normal(size=shape) for i, shape in enumerate([(4, 8), (8, 4)]))


def item_of(split_first: Any, split_hidden: Any = lambda h: h) -> ar.GraphItem:
    """Return the item of a step whose first matrix and hidden layer are marked."""
    up, down = tf.Variable(FIRST, name="up"), tf.Variable(SECOND, name="down")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = split_hidden(tf.nn.relu(x @ split_first(up)))
            loss = tf.reduce_mean((hidden @ down - y) ** 2)
        for variable, gradient in zip((up, down), tape.gradient(loss, (up, down)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    spec = tf.TensorSpec([None, models.WIDTH], tf.float64)
    return ar.GraphItem.from_function(step, spec, spec)


def cut(item: ar.GraphItem) -> set[str]:
    """Return the variables that are in blocks."""
    return {name for name, one in ar.rewrite(item, MESH).variables.items() if one.shards is not None}


def test_a_variable_that_is_split_where_it_is_read_is_cut_and_what_follows_with_it() -> None:
    item = item_of(lambda w: ar.split(w, [1, 2]))
    assert cut(item) == {"up", "down"}
    report = ar.verify(item, MESH)
    assert report.ok, report


def test_a_tensor_that_is_split_is_cut_for_its_readers() -> None:
    item = item_of(lambda w: w, lambda h: ar.split(h, [1, 2]))
    assert [edge.to for edge in ar.rewrite(item, MESH).report.plan.model_edges if "split" in edge.value] == ["split(1)"]
    report = ar.verify(item, MESH)
    assert report.ok, report


def test_marks_are_identities_where_nothing_is_distributed() -> None:
    x = tf.constant([[1.0, 2.0]])
    for marked in (ar.split(x, [1, 2]), ar.replicate(x), ar.assign(x, 1)):
        assert (marked.numpy() == x.numpy()).all()


@pytest.mark.parametrize("dims", [[2], [1, 2, 1], [0, 2]])
def test_a_mark_that_cannot_be_is_refused_where_it_is_made(dims: Sequence[int]) -> None:
    with pytest.raises(GraphError):
        ar.split(tf.zeros([2, 2]), dims)


def test_a_tensor_that_is_assigned_is_made_on_its_device() -> None:
    item = ar.rewrite(item_of(lambda w: w, lambda h: ar.assign(h, 1)), MESH)
    (node,) = [node for node in item.graph_def.node if node.name.endswith("autograph_sharding/assign-1")]
    assert node.device.endswith("CPU:1")
    assert ar.verify(item_of(lambda w: w, lambda h: ar.assign(h, 1)), MESH).ok
