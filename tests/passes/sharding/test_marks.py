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


def test_a_tensor_whose_dimensions_nobody_knows_is_marked() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
    def step(x: Any) -> Any:
        return ar.split(x, [1, 2])

    assert any("split-1x2" in one.name for one in step.get_concrete_function().graph.get_operations())


def test_a_tensor_that_is_assigned_is_made_on_its_device() -> None:
    item = ar.rewrite(item_of(lambda w: w, lambda h: ar.assign(h, 1)), MESH)
    (node,) = [node for node in item.graph_def.node if node.name.endswith("autograph_sharding/assign-1")]
    assert node.device.endswith("CPU:1")
    assert ar.verify(item_of(lambda w: w, lambda h: ar.assign(h, 1)), MESH).ok


@pytest.mark.parametrize("mark", [lambda h: ar.split(h, [1, 2]), ar.replicate, lambda h: ar.assign(h, 1)])
def test_a_mark_of_what_no_step_reads_does_nothing_and_that_is_said(mark: Any) -> None:
    weights = tf.Variable(FIRST, name="weights")

    def step(x: Any) -> Any:
        mark(tf.tanh(x @ weights))  # an output that this step does not use
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, models.WIDTH], tf.float64))
    assert any("no output, update or initialiser reads it" in note for note in ar.rewrite(item, MESH).report.plan.notes)
    report = ar.verify(item, MESH)
    assert report.ok, report


COLUMNS = {**MESH, "sharding": [{"match": "w.", "split": [1, 2]}]}


def four_layers(optimizer: bool = False) -> ar.GraphItem:
    """Return the item of a step of four square layers, with a name for what each gives: h0 to h3."""
    layers = [tf.Variable(np.random.default_rng(i).normal(size=(4, 4)), name=f"w{i}") for i in range(4)]
    adam = tf.keras.optimizers.Adam(0.01) if optimizer else None
    if adam is not None:
        adam.build(layers)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for i, layer in enumerate(layers):
                x = ar.checkpoint_name(tf.tanh(x @ layer), f"h{i}")
            loss = tf.reduce_mean(x**2)
        gradients = tape.gradient(loss, layers)
        if adam is not None:
            adam.apply_gradients(list(zip(gradients, layers, strict=True)))
        else:
            for layer, gradient in zip(layers, gradients, strict=True):
                layer.assign_sub(0.1 * gradient)
        return loss

    return ar.GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64))


def test_remat_keeps_what_a_name_means_also_where_devices_hold_parts_of_it() -> None:
    item = four_layers()
    config = {**COLUMNS, "remat": {"policy": "names", "names": ["h[02]"]}}
    (segment,) = ar.rewrite(item, config).report.recomputed.segments
    assert set(segment.kept) == {"checkpoint_name/h0/part_0", "checkpoint_name/h0/part_1"}
    report = ar.verify(item, config)
    assert report.ok, report
    with pytest.raises(ar.RewriteError, match="matches as a whole") as refused:
        ar.rewrite(item, {**COLUMNS, "remat": {"policy": "names", "names": ["h9"]}})
    assert "/part_" not in str(refused.value)


@pytest.mark.parametrize("where", [{}, {"boundaries": ["checkpoint_name/h0"]}, {"boundaries": ["checkpoint_name/h1"]}])
def test_stages_begin_after_a_tensor_of_which_devices_hold_parts(where: dict[str, Any]) -> None:
    """The gradients of two of the layers come in rows, and their variables are in columns."""
    stages = {"stages": 2, "microbatches": 2, **where}
    devices = [f"CPU:{i}" for i in range(4)]
    config = {**COLUMNS, "devices": devices, "strategy": {"name": "Pipeline"}, "pipeline": stages}
    report = ar.verify(four_layers(optimizer=True), config, batch=4)
    assert report.ok, report
