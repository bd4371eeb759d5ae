"""Buckets: small gradients that are ready together are summed by one collective, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.plan.parts.messages import EdgePlan
from tests.matrix.run import distributed, truth
from tests.support.training import control_flow, make_item, placeholder, train, v1, variable
from tests.zoo import GRAPHS, ZOO, Case, Options

X = np.random.default_rng(0).normal(size=(8, 3))
Update = tuple[Any, Any]  # a variable and what is subtracted from it


def mirrored(bucket_bytes: int = 4 * 2**20) -> dict[str, Any]:
    """Return a configuration."""
    strategy = {"name": "AllReduce", "variables": "mirrored", "bucket_bytes": bucket_bytes}
    return {"devices": ["CPU:0", "CPU:1"], "timeout_seconds": 30, "strategy": strategy}


def item_of(step: Callable[[Any], Mapping[str, Any]], version: int = 1) -> GraphItem:
    """Return an item of a step, which returns its outputs and its `train` ops."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(version):
        results = dict(step(placeholder("x", None, 3)))
        tf.group(results.pop("train"), name="train")
        outputs = [tf.identity(value, name=f"out_{name}").op.name for name, value in results.items()]
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=outputs, init_op="init")


def dense(*widths: int, dtype: Any = np.float64) -> dict[str, Any]:
    """Return the loss of a chain of layers: one gradient for each kernel and each bias."""
    y, size = placeholder("x", None, 3, dtype=dtype), 3
    for i, width in enumerate(widths):
        kernel = variable(f"kernel{i}", np.linspace(-1, 1, size * width, dtype=dtype).reshape(size, width))
        y, size = tf.tanh(y @ kernel + variable(f"bias{i}", np.zeros(width, dtype))), width
    return {"loss": tf.reduce_mean(y * y)}


def one_after_the_other(x: Any) -> Mapping[str, Any]:
    """The second gradient is scaled by the norm of the first one, of the whole batch."""
    first, second = variable("first", np.ones(3)), variable("second", np.ones(3))
    (slope,) = v1.gradients(tf.reduce_sum(tf.tanh(x * first)), [first])
    (other,) = v1.gradients(tf.reduce_sum(tf.tanh(x * second * tf.norm(slope))), [second])
    return {"slope": slope, "other": other, "train": [first.assign_sub(slope), second.assign_sub(other)]}


def after_a_loop_that_waits(x: Any) -> Mapping[str, Any]:
    """The body of the loop that the second gradient comes from waits for the norm of the first one."""
    first, second = variable("first", np.ones(3)), variable("second", np.ones(3))
    (slope,) = v1.gradients(tf.reduce_sum(tf.tanh(x * first)), [first])
    norm = tf.norm(slope)

    def body(i: Any, y: Any) -> tuple[Any, Any]:
        with tf.control_dependencies([norm]):
            return i + 1, tf.tanh(y)

    _, y = tf.while_loop(lambda i, _: i < 2, body, [0, x])
    (other,) = v1.gradients(tf.reduce_sum(y * second), [second])
    return {"slope": slope, "other": other, "train": [first.assign_sub(slope), second.assign_sub(other)]}


@pytest.mark.parametrize("step", [one_after_the_other, after_a_loop_that_waits])
def test_a_gradient_that_waits_for_the_reduction_of_another_is_not_put_into_its_bucket(step: Any) -> None:
    item = item_of(step)
    plan = ar.build_plan(item, mirrored())
    assert {edge.owner for edge in plan.edges if edge.lowering == "collective_reduce"} == {"first", "second"}
    assert not any(edge.bucket for edge in plan.edges)
    expected, got = train(item, [{"x": X}] * 2), train(ar.rewrite(item, plan), [{"x": X}] * 2)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-12)


@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
def test_no_member_of_a_bucket_waits_for_another_in_any_model(case: Case) -> None:
    built = case.build(Options(optimizer="adam", dtype=case.dtypes[0], batch=8))
    item = GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=list(built.outputs),
        init_op=built.init_op,
        batch_inputs=dict(built.batch_inputs),
    )
    buckets: dict[int, list[EdgePlan]] = {}
    for edge in ar.build_plan(item, mirrored()).edges:
        if edge.bucket:
            buckets.setdefault(edge.bucket, []).append(edge)
    needy: list[str] = []

    def observe(step: str, graph: Graph) -> None:
        for members in buckets.values() if step == "resolve-plan" else ():
            values = [graph.value(edge.value) for edge in members]
            for value in values:
                waiting = descendants(reader for reader, _ in value.uses)  # also by the back edges of loops
                needy.extend(f"{other.name} needs {value.name}" for other in values if other.node in waiting)

    ar.rewrite(item, mirrored(), observers=[observe])
    assert not needy


def test_a_v1_loop_that_waits_for_a_reduction_trains_to_the_values_of_one_device() -> None:
    """Buckets that overlooked the wait made this deadlock for a static batch of 8."""
    options = Options(batch=8)
    got, _ = distributed(ZOO["lstm_v1"].build(options), mirrored(), [8, 8])
    for name, value in truth("lstm_v1", options, (8, 8)).variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_comes_out_of_a_bucket_is_bit_for_bit_what_is_reduced_alone(dtype: Any) -> None:
    item = make_item(lambda: dense(4, 5, 1, dtype=dtype))
    feeds = [{"x": X[:rows].astype(dtype)} for rows in (8, 5, 1)]
    alone, together = (train(ar.rewrite(item, mirrored(size)), feeds) for size in (0, 120))
    for name, value in alone.variables.items():
        np.testing.assert_array_equal(together.variables[name], value, err_msg=name)


def in_branches(x: Any) -> Mapping[str, Any]:
    first, second = variable("first", np.ones(3)), variable("second", np.ones(3))

    def update() -> Any:
        slopes = v1.gradients(tf.reduce_sum(tf.tanh(x * first) * second), [first, second])
        with tf.control_dependencies([first.assign_sub(slopes[0]), second.assign_sub(slopes[1])]):
            return tf.constant(1.0)

    done = tf.cond(tf.reduce_sum(x) > 0, update, lambda: tf.constant(0.0))
    return {"done": done, "train": [done]}


def in_loops(x: Any) -> Mapping[str, Any]:
    first, second = variable("first", np.ones(3)), variable("second", np.ones(3))

    def body(i: Any) -> Any:
        slopes = v1.gradients(tf.reduce_sum(tf.tanh(x * first) * second), [first, second])
        with tf.control_dependencies(slopes):
            updates = [first.assign_sub(0.1 * slopes[0]), second.assign_sub(0.1 * slopes[1])]
        with tf.control_dependencies(updates):
            return i + 1

    done = tf.while_loop(lambda i: i < 3, body, [0])
    return {"done": done, "train": [done]}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("step", [in_branches, in_loops])
def test_what_is_reduced_in_a_loop_or_a_branch_is_in_no_bucket(step: Any, version: int) -> None:
    item = item_of(step, version)
    plan = ar.build_plan(item, mirrored())
    assert {edge.owner for edge in plan.edges if edge.lowering == "collective_reduce"} >= {"first", "second"}
    assert not any(edge.bucket for edge in plan.edges)
    feeds = [{"x": X}, {"x": -X}]
    expected, got = train(item, feeds), train(ar.rewrite(item, plan), feeds)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-12)


def test_a_step_that_reduces_maxima_only_has_no_buckets() -> None:
    def step(x: Any) -> Mapping[str, Any]:
        w = variable("w", np.zeros(3))
        return {"top": tf.reduce_max(x), "train": w.assign(tf.reduce_max(x, 0))}

    item = item_of(step)
    assert not any(edge.bucket for edge in ar.build_plan(item, mirrored()).edges)
    assert train(ar.rewrite(item, mirrored()), [{"x": X}]).variables["w"].tolist() == X.max(0).tolist()
