"""Roles: what is trained, and whose gradient consists of rows, in graphs, functions and Keras models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.analysis.variable_uses import roles
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.strategies.assemble import trained_variables
from tests.zoo import ZOO


def item_of(name: str) -> GraphItem:
    case = ZOO[name]
    built = case.build(optimizer="adam", dtype="float32")
    if case.kind == "function":
        return normalise(GraphItem.from_function(built.step, *built.specs, batch_inputs=dict(built.batch_inputs)))
    if case.kind == "keras":
        x, y = built.feeds(0, 4)
        return normalise(GraphItem.from_keras(built.model, _specs(x), _specs(y)))
    outputs, inputs = list(built.outputs), dict(built.batch_inputs)
    made = ar.GraphItem.from_graph(built.graph, train_op=built.train_op, outputs=outputs, batch_inputs=inputs)
    return normalise(made)


def _specs(arrays: Any) -> Any:
    return tf.nest.map_structure(lambda one: tf.TensorSpec((None, *one.shape[1:]), one.dtype), arrays)


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("language_model", {"topics"}),  # the other table is tied to the softmax
        ("transformer", {"words"}),
        ("mlp", set()),
        ("function_sparse", {"table"}),
        ("function_dense", set()),
        ("keras_two_inputs", {"table/embeddings"}),
        ("keras_cnn", set()),
    ],
)
def test_rows_are_told_from_whole_gradients(name: str, sparse: set[str]) -> None:
    item = item_of(name)
    found = roles(item)
    assert {variable for variable, role in found.items() if role.sparse and role.trained} == sparse


@pytest.mark.parametrize("name", ["mlp", "cnn", "language_model", "function_dense"])
def test_what_is_trained_is_found_where_nothing_says_so(name: str) -> None:
    item = item_of(name)
    stated = {variable for variable, role in roles(item).items() if role.trained}
    assert stated
    silent = replace(item, variables={key: replace(one, trainable=None) for key, one in item.variables.items()})
    assert {variable for variable, role in roles(silent).items() if role.trained} == stated


@pytest.mark.parametrize("name", ["lstm_v1", "lstm_v2", "cond_v1", "cond_v2"])
def test_variables_that_loops_and_branches_only_read_can_be_cut(name: str) -> None:
    found = trained_variables(item_of(name)).values()
    assert {one.obstacle for one in found} == {""}
