"""Lookups, samplers and user-partitioned tables train on servers and in shards as on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.cost.search import refusal
from autograph_rewrite.errors import ConfigError, PassError, VerifyError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import Mesh
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes.emit.instances import require_beside
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from tests.support.sharded_programs import Case, item_of, outcome
from tests.support.training import placeholder, v1, variable

SAMPLE = [
    Case("lookup_alone", "sgd", "Parallax", "shared", 2),
    Case("sampled_softmax", "adam", "FSDP", "mirrored", 3),
    Case("nce", "adagrad", "PartitionedPS", "shared", 2),
    Case("sparse_mean", "ftrl", "PSLoadBalancing", "mirrored", 2),
    Case("safe_sum_weighted", "rmsprop", "PS", "shared", 3),
    Case("user_mod", "ftrl", "Auto", "shared", 2),
    Case("user_div", "momentum", "UnevenPartitionedPS", "mirrored", 2),
    Case("wide_and_deep", "ftrl", "PSLoadBalancing", "shared", 2),
    Case("whole_batch", "adadelta", "PSLoadBalancing", "mirrored", 2),
    Case("in_a_loop", "proximal_adagrad", "PS", "mirrored", 2),
    Case("in_a_branch", "rmsprop_centered", "FSDP", "mirrored", 2),
]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case)))
def test_a_program_of_other_people_trains_as_on_one_device(case: Case) -> None:
    assert outcome(case, {}) == "equal"


@pytest.mark.parametrize("asked", [{"sync": False}, {"staleness": 2}], ids=str)
def test_a_slot_is_beside_its_variable_where_only_one_variable_does_not_wait(asked: dict[str, Any]) -> None:
    rule = {"match": "table", "synchronizer": "ps", **asked}
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "PSLoadBalancing"}, "variables": [rule]}
    try:
        new = ar.rewrite(item_of("gather", "adam"), config)
    except ConfigError:
        return
    with new.session() as session:
        session.run("init")
        session.run("train", {"ids": [1, 2, 3], "y": np.ones(3)})


SHARDED: dict[str, dict[str, Any]] = {
    "shards": {"strategy": {"name": "PartitionedAR", "variables": "mirrored"}},
    "a model axis": {"mesh": {"model": 2}, "sharding": [{"match": "w", "split": [1, 2]}]},
}


@pytest.mark.parametrize("sharded", SHARDED)
def test_a_function_checks_the_numbers_of_each_piece(sharded: str) -> None:
    w = tf.Variable(np.ones((4, 6)), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        slope = tf.debugging.check_numerics(tape.gradient(loss, w), "the gradient")
        w.assign_sub(0.1 * slope)
        return loss

    spec = tf.TensorSpec([None, 4], tf.float64)
    config = {"devices": ["CPU:0", "CPU:1"], **SHARDED[sharded]}
    report = ar.verify(ar.GraphItem.from_function(step, spec), config)
    assert report.ok, report
    many = ar.distribute(step, config, spec)
    many(tf.ones([6, 4], tf.float64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="the gradient"):
        many(tf.constant(np.full((6, 4), np.nan)))


@pytest.mark.parametrize("strategy", ["FSDP", "PartitionedPS", "PartitionedAR"])
def test_what_is_updated_under_a_condition_is_sharded_and_trains_as_on_one_device(strategy: str) -> None:
    w, step = tf.Variable(np.linspace(-1, 1, 24).reshape(6, 4), name="w"), tf.Variable(0, name="step")
    kept = tf.Variable(np.zeros((6, 4)), name="kept", trainable=False)

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        slope = tape.gradient(loss, w) + kept

        def update() -> Any:
            w.assign_sub(0.5 * slope)
            return kept.assign(tf.zeros_like(kept))

        tf.cond(step % 2 > 0, update, lambda: kept.assign(slope))
        step.assign_add(1)
        return loss

    item = ar.GraphItem.from_function(train, tf.TensorSpec([None, 6], tf.float64))
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy, "variables": "mirrored"}}
    new = ar.rewrite(item, config)
    assert {name for name, variable in new.variables.items() if variable.shards is not None} == {"w", "kept"}
    report = ar.verify(item, config)
    assert report.ok, report
    many, x = ar.distribute(train, config, tf.TensorSpec([None, 6], tf.float64)), np.linspace(-1, 2, 30).reshape(5, 6)
    first = w.numpy()
    many(tf.constant(x))
    np.testing.assert_array_equal(w.numpy(), first)  # kept, not taken
    many(tf.constant(x))
    with tf.GradientTape() as tape:
        w.assign(first)
        loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
    expected = first - 0.5 * 2 * tape.gradient(loss, w).numpy()
    w.assign(first)
    for state in (step, kept):
        state.assign(tf.zeros_like(state))
    many(tf.constant(x))
    many(tf.constant(x))
    np.testing.assert_allclose(w.numpy(), expected, rtol=0, atol=1e-12)


def test_what_writes_a_variable_from_another_device_is_refused_before_it_runs() -> None:
    graph = Graph()
    attrs = {"dtype": 1, "shape": (), "shared_name": "w"}
    w = graph.add("VarHandleOp", name="w", attrs=attrs, device="/device:CPU:1").output()
    one = graph.add("Const", name="one", attrs={"value": 1.0, "dtype": 1}).output()
    graph.add("AssignAddVariableOp", [w, one], name="update", device="/device:CPU:0")
    with pytest.raises(VerifyError, match=r"'update' runs on /device:CPU:0, but 'w'.* is on /device:CPU:1"):
        require_beside(graph, ["w"], ReplicaLayout(replace(Mesh.of(1), devices=("/device:CPU:0",))))


@pytest.mark.parametrize("strategy", ["FSDP", "PartitionedPS", "PartitionedAR"])
def test_a_variable_that_works_on_whole_rows_or_is_captured_by_a_loop_stays_whole_with_a_note(strategy: str) -> None:
    with tf.Graph().as_default() as graph:
        x, w = placeholder("x", None, 4), variable("w", np.ones((4, 4)))
        _, out = tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, tf.tanh(a @ w)), (0, x))
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(out**2, name="loss"), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = normalise(ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init"))
    plan = ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy}})
    captured = any(node.op == "Enter" and node.inputs[0].node.op == "VarHandleOp" for node in item.graph)
    assert any(note.startswith("'w' stays whole: a loop captures it") for note in plan.notes) == captured
    assert refusal(item, plan) is None


def test_a_variable_of_open_shape_stays_whole_with_a_note_and_is_refused_where_it_is_named() -> None:
    queue = tf.Variable(np.zeros((2, 4)), shape=tf.TensorShape([None, 4]), name="queue")
    w = tf.Variable(np.ones((4, 4)), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2) + tf.reduce_mean(queue.read_value() ** 2)
        gradients = tape.gradient(loss, [w, queue])
        w.assign_sub(0.1 * gradients[0])
        queue.assign(queue.read_value() - 0.1 * gradients[1])
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64))
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "FSDP"}}
    plan = ar.build_plan(item, config)
    assert [note for note in plan.notes if "its shape is open" in note] != []
    named = next(note.split("'")[1] for note in plan.notes if "its shape is open" in note)
    rule = {"match": named, "partition": {"axis": 1, "shards": 2}}
    with pytest.raises(ConfigError, match="its shape is open"):
        ar.build_plan(item, {**config, "variables": [rule]})


def test_a_plan_that_cannot_be_carried_out_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    item = normalise(item_of("gather", "sgd"))
    plan = ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "PS"}})

    def refuse(*_: Any, **__: Any) -> Any:
        raise PassError("no way")

    monkeypatch.setattr("autograph_rewrite.passes.emit.instances.place_instances", refuse)
    assert "no way" in str(refusal(item, plan))


def test_a_maximum_that_a_loop_hands_on_is_exchanged_as_the_plan_says() -> None:
    w = tf.Variable(np.ones(4))

    def step(x: Any) -> Any:
        _, top = tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, tf.reduce_max(x * a, 0)), (0, w + 1))
        loss = tf.reduce_sum(top)
        w.assign_sub(0.01 * loss * w)
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, 4], tf.float64))
    config = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1"]}}
    plan = ar.build_plan(item, config)
    exchanged = [edge for edge in plan.edges if edge.from_ == "partial(max)"]
    new = ar.rewrite(item, plan, task=0)
    assert [edge.lowering for edge in exchanged] == ["one_shot_reduce"]
    assert len([node for node in new.graph if node.op == "CollectiveGatherV2" and "while" in node.name]) == 1
