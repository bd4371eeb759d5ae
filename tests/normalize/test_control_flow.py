"""Functional loops and branches become v1 control flow that computes, updates and differentiates the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.ops.traits import ops_with
from tests.support.covering import covering
from tests.support.normal_form import assert_same_calls, assert_same_steps, ops, v1
from tests.zoo import ZOO

X = np.linspace(0.1, 1.0, 5)


def variables() -> tuple[Any, Any]:
    return tf.Variable(1.5, dtype=tf.float64, name="v"), tf.Variable(0.5, dtype=tf.float64, name="w")


def test_the_gradient_of_a_loop_through_its_tensor_lists_is_the_same() -> None:
    v, _ = variables()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, tf.sin(a) * v), [tf.constant(0), x])[1]
        return tape.gradient(y, [x, v])

    normal = assert_same_calls(step, X)
    assert {"TensorListPushBack", "TensorListPopBack", "LoopCond"} <= ops(normal)


def test_nested_loops_branches_and_calls_with_effects_run_their_effects_as_often() -> None:
    v, w = variables()

    @tf.function
    def inner(a: Any, b: Any) -> Any:
        v.assign_add(tf.reduce_sum(a))
        return a * v, b

    def step(x: Any) -> Any:
        def body(i: Any, a: Any) -> Any:
            def again(j: Any, b: Any) -> Any:
                w.assign_add(0.25)
                return j + 1, b + tf.cast(j, b.dtype) * v

            _, b = tf.while_loop(lambda j, _: j < i, again, [tf.constant(0), a])
            return i + 1, tf.cond(i % 2 == 0, lambda: b * 2 + inner(b, b)[0], lambda: tf.ones_like(b) * 7.0)

        return tf.while_loop(lambda i, _: i < 4, body, [tf.constant(0), x])[1]

    normal = assert_same_calls(step, X)
    frames = {node.attr("frame_name") for node in normal.graph if node.op == "Enter"}
    conditions = [node for node in normal.graph if node.op == "LoopCond"]
    assert len(frames) == len(conditions) == 2


def test_an_update_that_reads_nothing_of_the_iteration_runs_once_per_iteration_and_not_once_more() -> None:
    v, w = variables()

    def step(x: Any) -> Any:
        for _ in tf.range(3):
            v.assign_add(1.0)
            if v > 3.0:
                w.assign_sub(1.0)
        return tf.reduce_sum(x)

    assert_same_calls(step, X, steps=1)
    assert_same_calls(step, X, steps=3)


def test_a_loop_whose_condition_reads_a_variable_and_that_breaks_stops_at_the_same_time() -> None:
    v, _ = variables()

    def step(_: Any) -> Any:
        n = tf.constant(0)
        while v < 100.0:
            v.assign(v * 2)
            n += 1
            if n > 3:
                break
        return n

    assert_same_calls(step, X)


def test_what_a_body_passes_through_enters_the_frame_as_a_constant() -> None:
    v, _ = variables()

    @tf.function
    def inner(a: Any, b: Any) -> Any:
        v.assign_add(tf.reduce_sum(a))
        return a * v, b

    def step(x: Any) -> Any:
        a = x
        for _ in tf.range(3):
            a, _ = inner(x, a)
            a = a + inner(a, x)[1]
        return a

    normal = assert_same_calls(step, X)
    constant = {node.inputs[0].name for node in normal.graph if node.op == "Enter" and node.attr("is_constant")}
    assert "x" in constant
    assert constant & {variable.handle for variable in normal.variables.values()}


def test_map_and_scan_with_their_gradients_are_the_same() -> None:
    v, w = variables()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.map_fn(lambda e: e * v * v, x)
            loss = tf.reduce_sum(tf.scan(lambda a, e: a * w + e, y))
        return tape.gradient(loss, [v, w])

    assert_same_calls(step, X)


@pytest.mark.parametrize("scale", [1.0, -1.0, 3.0])
def test_the_gradient_of_branches_reads_the_values_of_the_branch_itself(scale: float) -> None:
    v, w = variables()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x * v) * tf.cos(x), lambda: tf.exp(x * w) * w)
            z = tf.cond(
                tf.reduce_sum(y) > 3,
                lambda: y * y * v,
                lambda: tf.cond(tf.reduce_sum(y) > 1, lambda: y * w * tf.exp(y), lambda: y * y),
            )
        return tape.gradient(z, [x, v, w])

    normal = assert_same_calls(step, X * scale)
    assert "OptionalGetValue" not in ops(normal)


def test_the_gradient_of_a_branch_inside_a_loop_is_the_same() -> None:
    v, w = variables()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for i in tf.range(4):
                y = tf.sin(y) * v if i % 2 == 0 else y * y * w * tf.exp(y)
        return tape.gradient(y, [x, v, w])

    assert_same_calls(step, X)


@pytest.mark.parametrize("index", range(5))
def test_every_index_of_a_case_takes_its_branch_and_any_other_the_last(index: int) -> None:
    v, _ = variables()

    def step(x: Any) -> Any:
        return tf.switch_case(
            tf.cast(x[0], tf.int32) - 1, [lambda: x + 1, lambda: tf.zeros_like(x), lambda: x * v.assign_add(1.0)]
        )

    assert_same_calls(step, np.array([float(index), 0.3]))


def test_a_branch_runs_its_effects_after_what_the_cond_waits_for() -> None:
    graph = tf.Graph()
    with graph.as_default():
        v = v1.get_variable("v", initializer=1.0, use_resource=True)
        x = v1.placeholder(tf.float32, [None], "x")
        with tf.control_dependencies([v.assign_add(tf.reduce_sum(x))]):
            taken = tf.cond(x[0] > 0, lambda: v.assign(v * 2.0).read_value(), lambda: v.assign(v * 3.0).read_value())
        with tf.control_dependencies([taken]):
            tf.identity(v.read_value(), "after")
        v1.global_variables_initializer()
    item = GraphItem.from_graph(graph, outputs=["after"], train_op="after")
    normal = assert_same_steps(item, [{"x:0": [1.0]}, {"x:0": [-3.0]}] * 3)
    assert not ops_with("functional") & ops(normal)


def test_the_outputs_of_a_loop_and_a_branch_stay_fetchable_by_their_own_names() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None], "x")
        loop = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2.0), [tf.constant(0), x], name="loop")
        tf.identity(loop[1] + tf.cond(x[0] > 0, lambda: x, lambda: -x, name="branch"), "y")
    item = GraphItem.from_graph(graph, outputs=["y", "loop:3", "branch"])
    normal = assert_same_steps(item, [{"x:0": [1.0, 2.0]}, {"x:0": [-1.0, 2.0]}])
    assert normal.graph.node("loop").op == "IdentityN"
    assert normal.graph.node("branch").op == "Identity"


def test_two_rewrites_of_one_graph_give_the_same_bytes() -> None:
    item = _zoo_item("gru_v2")
    assert normalise(item).graph_bytes == normalise(item).graph_bytes


def _zoo_item(name: str, **options: Any) -> GraphItem:
    built = ZOO[name].build(**options)
    return GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=built.outputs,
        init_op=built.init_op,
        batch_inputs=built.batch_inputs,
    )


@pytest.mark.parametrize(
    ("name", "refs"), covering(["lstm_v2", "lstm_v1", "gru_v2", "cond_v2", "cond_v1"], [False, True])
)
def test_the_loops_and_branches_of_the_zoo_train_to_the_same_values(name: str, refs: bool) -> None:
    options = {"optimizer": "adam" if refs else "momentum", "ref_variables": refs, "batch": 4 if refs else None}
    built = ZOO[name].build(**options)
    normal = assert_same_steps(_zoo_item(name, **options), [built.feeds(step, 4) for step in range(3)])
    assert not (ops_with("functional") | {"VariableV2", "Assign"}) & ops(normal)
    assert not normal.graph.library
