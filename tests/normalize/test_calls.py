"""Function calls become their bodies: same results, same effects, same names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.errors import GraphError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.ops.traits import ops_with
from tests.support.normal_form import assert_same_calls, assert_same_steps, ops, run_steps, v1

X = np.linspace(0.1, 1.0, 5)


def test_nested_calls_of_one_function_are_inlined_each_with_names_of_its_own() -> None:
    v = tf.Variable(1.5, dtype=tf.float64)

    @tf.function
    def inner(a: Any, b: Any) -> Any:
        v.assign_add(tf.reduce_sum(a))
        return a * v, b

    @tf.function
    def middle(a: Any) -> Any:
        p, q = inner(a, a + 1)
        return inner(q, p)

    def outer(x: Any) -> Any:
        return middle(x), middle(x * 2)

    normal = assert_same_calls(outer, X)
    adds = [node.name for node in normal.graph if node.op == "AssignAddVariableOp"]
    assert len(set(adds)) == 4
    assert all("/" in name for name in adds)
    assert not normal.graph.library


def test_a_result_that_is_an_argument_is_the_argument() -> None:
    @tf.function
    def swap(a: Any, b: Any) -> Any:
        return b, a

    normal = assert_same_calls(lambda x: swap(x, x + 1.0), X)
    assert "AddV2" in ops(normal)


def test_effects_of_a_call_run_when_only_its_result_is_used() -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = v1.get_variable("v", initializer=1.0, use_resource=True)

        @tf.function
        def step(a: Any) -> Any:
            v.assign_add(tf.reduce_sum(a))
            return a * 2.0

        x = v1.placeholder(tf.float32, [None], "x")
        tf.identity(step(x), "y")
        v1.global_variables_initializer()
    item = GraphItem.from_graph(graph, outputs=["y"], train_op="y")
    normal = assert_same_steps(item, [{"x:0": [1.0, 2.0]}] * 3)
    assert not ops_with("functional") & ops(normal)


def test_the_call_itself_stays_fetchable_and_runnable_under_its_name() -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = v1.get_variable("v", initializer=1.0, use_resource=True)

        @tf.function
        def step(a: Any) -> Any:
            v.assign_add(tf.reduce_sum(a))
            return a * 2.0, a + v

        x = v1.placeholder(tf.float32, [None], "x")
        step(x)
        v1.global_variables_initializer()
    (call,) = [op.name for op in graph.get_operations() if op.type == "StatefulPartitionedCall"]
    feeds = [{"x:0": [1.0, 2.0]}] * 2
    both = GraphItem.from_graph(graph, outputs=[f"{call}:1", f"{call}:0"], train_op=call)
    assert_same_steps(both, feeds)
    only_run = GraphItem.from_graph(graph, train_op=call)
    assert normalise(only_run).graph.node(call).op == "NoOp"
    assert_same_steps(only_run, feeds)


def test_a_control_edge_from_a_call_waits_for_its_effects_and_one_to_a_call_holds_its_body_back() -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = v1.get_variable("v", initializer=1.0, use_resource=True)

        @tf.function
        def double() -> Any:
            v.assign(v * 2.0)
            return tf.constant(0.0)

        x = v1.placeholder(tf.float32, [None], "x")
        with tf.control_dependencies([v.assign_add(tf.reduce_sum(x))]):
            doubled = double()
        with tf.control_dependencies([doubled]):
            tf.identity(v.read_value(), "after")
        v1.global_variables_initializer()
    item = GraphItem.from_graph(graph, outputs=["after"], train_op="after")
    assert_same_steps(item, [{"x:0": [1.0]}, {"x:0": [3.0]}] * 3)


def test_a_call_inside_a_v1_loop_and_a_v1_branch_stays_in_its_frame() -> None:
    v1.disable_control_flow_v2()
    try:
        graph = tf.Graph()
        with graph.as_default():
            function = tf.function(lambda a: (a * 2.0 + 1.0, tf.constant(3.0)))
            x = v1.placeholder(tf.float32, [None], "x")
            n = tf.constant(0)

            def body(i: Any, a: Any) -> Any:
                b, c = function(a)
                even = tf.equal(i % 2, 0)
                return i + 1, tf.cond(even, lambda: function(b)[0], lambda: function(b)[1] * tf.ones_like(b)) + c

            tf.identity(tf.while_loop(lambda i, a: i < 4, body, [n, x])[1], "y")
    finally:
        v1.enable_control_flow_v2()
    item = GraphItem.from_graph(graph, outputs=["y"])
    assert "PartitionedCall" in ops(item)
    normal = assert_same_steps(item, [{"x:0": [1.0, 2.0]}])
    assert not ops_with("functional") & ops(normal)


def test_a_call_by_function_name_with_type_attributes_is_inlined() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None], "x")
        tf.identity(x, "y")
    message = graph.as_graph_def()
    function = message.library.function.add()
    function.signature.name = "twice"
    function.signature.input_arg.add(name="a", type_attr="T")
    function.signature.output_arg.add(name="r", type_attr="T")
    function.signature.attr.add(name="T", type="type")
    add = function.node_def.add(name="sum", op="AddV2", input=["a", "a"])
    add.attr["T"].placeholder = "T"
    function.ret["r"] = "sum:z:0"
    call = message.node.add(name="call", op="twice", input=["x"])
    call.attr["T"].type = 1
    message.node[1].input[:] = ["call"]
    normal = normalise(GraphItem.from_graph(message, outputs=["y"]))
    ((result,),), _ = run_steps(normal, [{"x:0": [1.0, 2.0]}])  # TensorFlow's Python import refuses the original
    np.testing.assert_array_equal(result, [2.0, 4.0])
    assert normal.graph.node("call/sum").op == "AddV2"


def test_a_function_that_calls_itself_is_refused_by_name() -> None:
    message = tf.Graph().as_graph_def()
    function = message.library.function.add()
    function.signature.name = "loop"
    function.signature.input_arg.add(name="a", type=1)
    function.signature.output_arg.add(name="r", type=1)
    function.node_def.add(name="again", op="loop", input=["a"])
    function.ret["r"] = "again:r:0"
    message.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    message.node.add(name="y", op="loop", input=["x"])
    item = GraphItem.from_graph(message, train_op="y")
    with pytest.raises(GraphError, match=r"'loop' calls itself \(loop -> loop\)"):
        normalise(item)


def test_the_functions_of_a_dataset_stay_and_unused_ones_leave_the_library() -> None:
    graph = tf.Graph()
    with graph.as_default():
        data = tf.data.Dataset.range(6).map(lambda i: tf.cast(i, tf.float32)).batch(2).repeat()
        x = v1.data.make_one_shot_iterator(data).get_next()
        tf.identity(tf.function(lambda a: tf.reduce_sum(a) * 2.0)(x), "y")
    item = GraphItem.from_graph(graph, outputs=["y"])
    before = len(item.graph.library)
    normal = assert_same_steps(item, [{}] * 3)
    assert 0 < len(normal.graph.library) < before
    assert {"OneShotIterator", "IteratorGetNext"} <= ops(normal)
    assert item.inputs["IteratorGetNext"].batch_axis == 0


def test_a_call_that_only_initialises_is_left_as_it_is() -> None:
    graph = tf.Graph()
    with graph.as_default():
        start = tf.function(lambda: tf.ones([2]))()
        w = v1.get_variable("w", initializer=start, use_resource=True)
        x = v1.placeholder(tf.float32, [None, 2], "x")
        tf.group(v1.assign_add(w, tf.reduce_sum(x, 0)), name="train")
        v1.global_variables_initializer()
    item = GraphItem.from_graph(graph, train_op="train")
    normal = assert_same_steps(item, [{"x:0": [[1.0, 2.0]]}] * 2)
    assert ops(normal) & {"PartitionedCall", "StatefulPartitionedCall"}


def test_a_batch_that_an_iterator_inside_a_function_yields_becomes_an_input() -> None:
    iterator = iter(tf.data.Dataset.from_tensor_slices(np.ones((6, 3))).batch(2))
    inner = tf.function(lambda it: tf.reduce_sum(next(it)))
    item = GraphItem.from_function(lambda it: inner(it), iterator)
    assert all(info.batch_axis is None for info in item.inputs.values())
    normal = normalise(item)
    (found,) = [info for info in normal.inputs.values() if info.batch_axis == 0]
    assert found.tensor.endswith("IteratorGetNext:0")
    assert found.shape == (None, 3)
