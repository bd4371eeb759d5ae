"""What is distributed already is refused by name, in whatever form it comes; it never hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.support.tf1 import descent, regression
from tests.support.training import MODES, distributed, v1

NAMES: dict[str, Any] = {"train_op": "GradientDescent", "outputs": ["Mean"], "init_op": "init_all"}


def original() -> GraphItem:
    with tf.Graph().as_default() as graph:
        descent(regression(reference=False)[2])
        v1.group(v1.global_variables_initializer(), name="init_all")
    return GraphItem.from_graph(graph, **NAMES)


@pytest.mark.parametrize("mode", MODES)
def test_a_rewritten_graph_is_not_rewritten_again(mode: str, tmp_path: Path) -> None:
    new = distributed(original(), mode)
    new.save(tmp_path / "new.ar")
    (tmp_path / "new.pb").write_bytes(new.graph_bytes)
    forms = [
        new,
        GraphItem.load(tmp_path / "new.ar"),
        GraphItem.load(tmp_path / "new.pb", **NAMES),
        GraphItem.from_graph(new.graph_def, **NAMES),
        GraphItem.from_graph(new.session().graph, **NAMES),
    ]
    for again in forms:
        for verb in (ar.rewrite, ar.build_plan, ar.verify):
            with pytest.raises(ar.RewriteError, match="already distributed"):
                verb(again, {"devices": ["CPU:0", "CPU:1"]})


def test_a_graph_with_collectives_of_somebody_else_is_refused() -> None:
    with tf.Graph().as_default() as graph:
        _, _, loss = regression(reference=False)
        tf.raw_ops.CollectiveReduce(
            input=loss, group_size=2, group_key=1, instance_key=1, merge_op="Add", final_op="Id", subdiv_offsets=[0]
        )
        descent(loss)
        v1.group(v1.global_variables_initializer(), name="init_all")
    item = GraphItem.from_graph(graph, **NAMES)
    with pytest.raises(ar.RewriteError, match="already distributed: it holds a collective"):
        distributed(item, "shared")


def test_a_function_is_not_distributed_twice_nor_inside_another() -> None:
    w = tf.Variable(np.ones([3, 1]))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    config = {"devices": ["CPU:0", "CPU:1"]}
    run = ar.distribute(step, config)
    assert run(np.ones([4, 3])) == 9.0
    with pytest.raises(ar.RewriteError, match="'step' is already distributed"):
        ar.distribute(run, config)
    with pytest.raises(ar.RewriteError, match="already distributed"):
        ar.distribute(tf.function(lambda x: run(x)), config)(np.ones([4, 3]))


def test_a_model_is_not_distributed_twice_even_when_compiled_anew() -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    config = {"devices": ["CPU:0", "CPU:1"]}
    ar.distribute(model, config)
    model.compile("adam", "mse")
    with pytest.raises(ar.RewriteError, match="'small' is already distributed"):
        ar.distribute(model, config)
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)


@pytest.mark.parametrize("target", [3, "model", [1, 2], None, {"devices": ["CPU:0"]}, dict])
def test_what_is_neither_a_model_nor_a_function_is_refused_when_it_is_given(target: Any) -> None:
    with pytest.raises(ar.GraphError, match="a compiled Keras model, or a function that runs one training step"):
        ar.distribute(target, {"devices": ["CPU:0", "CPU:1"]})
    for verb in (ar.rewrite, ar.build_plan):
        with pytest.raises(ar.GraphError, match=r"expected a GraphItem, not \w+\n.*from_keras"):
            verb(target, {"devices": ["CPU:0", "CPU:1"]})


@pytest.mark.parametrize("taker", [ar.on_preemption, ar.on_resize])
def test_what_a_call_returned_is_refused_where_the_function_was_meant(taker: Any) -> None:
    with pytest.raises(ar.ConfigError, match="takes a function, not NoneType"):
        taker(None)
