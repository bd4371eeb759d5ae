"""Reference variables become resource variables, with the same values at the same times under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.errors import GraphError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from tests.support.covering import covering
from tests.support.normal_form import assert_same_steps, ops, v1
from tests.zoo import ZOO

FEEDS = [{"x:0": [float(i + 1), 2.0]} for i in range(3)]


def built(body: Callable[[Any, Any], None]) -> Any:
    """Return a graph that `body(x, w)` has filled, with a reference variable `w` and an `init`."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None], "x")
        w = v1.get_variable("w", initializer=[1.0, -2.0], use_resource=False)
        body(x, w)
        tf.group(v1.global_variables_initializer(), name="init")
    return graph


def test_the_variable_and_its_read_stay_fetchable_and_the_handle_is_new() -> None:
    graph = built(lambda x, w: tf.group(v1.assign_add(w, x), name="train"))
    item = GraphItem.from_graph(graph, train_op="train")
    normal = assert_same_steps(item, FEEDS[:1], fetches=["x:0"])
    assert item.variables["w"].handle == "w"
    assert normal.variables["w"].handle == "w/handle"
    assert normal.variables["w"].initializer == "w/Assign"
    assert {normal.graph.node(name).op for name in ("w", "w/read")} == {"ReadVariableOp"}
    assert normal.graph.node("w/handle").attr("shared_name") == b"w"


def test_an_update_that_is_read_gives_the_value_after_it() -> None:
    def body(x: Any, w: Any) -> None:
        first = v1.assign_add(w, x, name="first")
        second = v1.assign_sub(first, x * 0.5, name="second")  # an update through an update
        tf.identity(second * 3.0, "y")

    item = GraphItem.from_graph(built(body), outputs=["y"])
    normal = assert_same_steps(item, FEEDS)
    assert normal.graph.node("second").op == "ReadVariableOp"
    assert normal.graph.node("second/update").op == "AssignSubVariableOp"
    assert normal.graph.node("first").op == "AssignAddVariableOp"


def test_an_update_that_is_an_output_keeps_its_name() -> None:
    graph = built(lambda x, w: v1.assign_add(w, x, name="train"))
    item = GraphItem.from_graph(graph, outputs=["train"], train_op="train")
    assert_same_steps(item, FEEDS)


def test_a_direct_read_under_control_dependencies_sees_what_it_waits_for() -> None:
    def body(x: Any, w: Any) -> None:
        with tf.control_dependencies([v1.assign_add(w, x).op]):
            later = tf.raw_ops.Mul(x=w._variable, y=x)
        with tf.control_dependencies([later.op]), tf.control_dependencies([v1.assign(w, later).op]):
            tf.raw_ops.AddV2(x=w._variable, y=x, name="y")

    normal = assert_same_steps(GraphItem.from_graph(built(body), outputs=["y"]), FEEDS)
    assert normal.graph.node("y/read_0").op == "ReadVariableOp"


def test_scatter_updates_and_counters_have_resource_forms() -> None:
    def body(x: Any, w: Any) -> None:
        count = v1.get_variable("count", initializer=0, use_resource=False)
        updates = [
            v1.scatter_add(w, [1, 1], x),
            v1.scatter_nd_update(w, [[0]], x[:1]),
            v1.count_up_to(count, 10) if hasattr(v1, "count_up_to") else v1.assign_add(count, 1),
        ]
        with tf.control_dependencies(updates[:1]), tf.control_dependencies([v1.scatter_mul(w, [0], [2.0])]):
            tf.group(*updates, name="train")

    graph = built(body)
    item = GraphItem.from_graph(graph, train_op="train")
    normal = normalise(item)
    assert {"ResourceScatterAdd", "ResourceScatterNdUpdate", "ResourceScatterMul", "ResourceCountUpTo"} <= ops(normal)


def test_a_variable_updated_in_a_v1_branch_is_updated_in_that_branch_only() -> None:
    v1.disable_control_flow_v2()
    try:

        def body(x: Any, w: Any) -> None:
            first = tf.cond(x[0] > 1.5, lambda: tf.identity(v1.assign_add(w, x)), lambda: tf.identity(w))
            with tf.control_dependencies([first]):
                taken = tf.cond(x[0] > 2.5, lambda: w._ref() + x, lambda: tf.identity(v1.assign(w, x)))
                tf.identity(taken, "y")

        graph = built(body)
    finally:
        v1.enable_control_flow_v2()
    item = GraphItem.from_graph(graph, outputs=["y"], train_op="y")
    normal = assert_same_steps(item, FEEDS)
    assert not {"RefSwitch", "Assign", "AssignAdd"} & ops(normal)


def test_initialised_checks_and_the_saver_follow(tmp_path: Any) -> None:
    def body(x: Any, w: Any) -> None:
        tf.group(v1.assign_add(w, x), name="train")
        v1.is_variable_initialized(w)
        v1.train.Saver(name="save")

    item = GraphItem.from_graph(built(body), train_op="train")
    normal = normalise(item)
    assert not {"Assign", "VariableV2", "IsVariableInitialized"} & ops(normal)
    assert {"VarIsInitializedOp", "SaveV2", "RestoreV2"} <= ops(normal)
    graph = tf.Graph()
    with graph.as_default():
        message = normal.graph_def
        for node in message.node:
            node.attr.pop("_output_shapes", None)
        tf.import_graph_def(message, name="")
    path = str(tmp_path / "checkpoint")
    with v1.Session(graph=graph) as session:
        session.run("init")
        session.run("train", {"x:0": [5.0, 6.0]})
        session.run("save/control_dependency:0", {"save/Const:0": path})
        session.run("init")
        session.run("save/restore_all", {"save/Const:0": path})
        np.testing.assert_array_equal(session.run("w:0"), [6.0, 4.0])


def test_a_variable_of_changing_shape_keeps_changing_it() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None], "x")
        w = v1.Variable([0.0], validate_shape=False, use_resource=False, name="w")
        v1.assign(w, tf.concat([w, x], 0), validate_shape=False, name="grow")
        tf.group(v1.global_variables_initializer(), name="init")
    assert_same_steps(GraphItem.from_graph(graph, train_op="grow"), FEEDS)


def test_an_op_without_a_resource_form_is_refused_by_name() -> None:
    graph = built(lambda x, w: tf.raw_ops.RefSelect(index=0, inputs=[w._ref(), w._ref()], name="chosen"))
    item = GraphItem.from_graph(graph, train_op="chosen")
    with pytest.raises(GraphError, match=r"RefSelect on the variable 'w'") as caught:
        normalise(item)
    assert caught.value.node_name == "chosen"


@pytest.mark.parametrize(
    ("name", "optimizer"),
    covering(["mlp", "language_model"], ["sgd", "momentum", "adam", "adagrad", "rmsprop", "ftrl", "adadelta"]),
)
def test_every_optimizer_trains_to_the_same_values(name: str, optimizer: str) -> None:
    case = ZOO[name].build(ref_variables=True, optimizer=optimizer)
    item = GraphItem.from_graph(
        case.graph, train_op=case.train_op, outputs=case.outputs, init_op=case.init_op, batch_inputs=case.batch_inputs
    )
    normal = assert_same_steps(item, [case.feeds(step, 4) for step in range(3)])
    assert not [op for op in ops(normal) if op.startswith(("Apply", "SparseApply", "Scatter"))]
