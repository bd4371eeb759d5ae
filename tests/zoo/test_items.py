"""Every zoo entry becomes an item: its batch inputs, its outputs, its train op and all of its variables."""

from __future__ import annotations

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.format import serde
from tests.matrix.table import specs
from tests.zoo import FUNCTIONS, GRAPHS, MODELS, Case
from tests.zoo.autodist import AUTODIST

STATIC = 6


def wrapped(case: Case, **changes: object) -> ar.GraphItem:
    built = case.build(dtype=case.dtypes[0], **changes)
    return ar.GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs) or None,
    )


@pytest.mark.parametrize("case", [*GRAPHS, *AUTODIST.values()], ids=lambda case: case.name)
def test_a_graph_comes_with_its_variables_inputs_and_outputs(case: Case):
    built = case.build(dtype=case.dtypes[0], optimizer="adam")
    item = wrapped(case, optimizer="adam")

    assert set(item.variables) == set(built.variables)
    assert {name: info.batch_axis for name, info in item.inputs.items() if name in built.batch_inputs} == dict(
        built.batch_inputs
    )
    assert list(item.outputs) == [name.removesuffix(":0") for name in built.outputs]
    assert item.targets == (built.train_op,)
    assert item.init_op == built.init_op


@pytest.mark.parametrize("case", [*GRAPHS, *AUTODIST.values()], ids=lambda case: case.name)
def test_the_round_trip_of_a_graph_is_exact(case: Case):
    graph_def = case.build(dtype=case.dtypes[0], optimizer="adam").graph.as_graph_def(add_shapes=True)
    data = graph_def.SerializeToString()

    assert type(graph_def).FromString(serde.to_bytes(serde.from_bytes(data))) == graph_def


@pytest.mark.parametrize("case", [case for case in GRAPHS if not case.name.startswith("lstm")], ids=lambda c: c.name)
def test_the_batch_inputs_of_a_graph_with_an_open_dimension_0_need_no_names(case: Case):
    built = case.build(dtype=case.dtypes[0])
    item = ar.GraphItem.from_graph(built.graph, train_op="train", outputs=["loss"], init_op="init")

    assert {name: info.batch_axis for name, info in item.inputs.items()} == dict(built.batch_inputs)


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_a_function_comes_with_all_the_variables_that_it_captures(case: Case):
    built = case.build(optimizer="adam")
    item = ar.GraphItem.from_function(built.step, *built.specs, batch_inputs=dict(built.batch_inputs))

    assert set(built.variables) == set(item.variables)
    assert {name: info.batch_axis for name, info in item.inputs.items()} == dict(built.batch_inputs)
    assert "loss" in item.outputs


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_keras_model_comes_with_weights_optimizer_and_metric_variables(case: Case):
    built = case.build(optimizer="adam")
    x, y = built.feeds(0, STATIC)
    item = ar.GraphItem.from_keras(built.model, specs(x), specs(y))

    assert {each.path for each in built.model.trainable_variables} <= set(item.variables)
    assert len(item.variables) >= len(built.model.variables) + 2 * len(built.model.trainable_variables)
    assert {info.batch_axis for info in item.inputs.values()} == {0}
    assert len(item.inputs) == len(tf.nest.flatten((x, y)))
