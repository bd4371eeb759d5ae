"""Lookups, samplers and user-partitioned tables train on servers and in shards as on one device."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.covering import covering
from tests.support.sharded_programs import Case, item_of, outcome

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


def _reads_in_loops(where: str, w: Any, m: Any, table: Any, x: Any) -> Any:
    """Return what a loop makes of a batch with variables that it captures."""

    def loop(step: Callable[[Any, Any], Any], first: Any = x, count: Any = 3) -> Any:
        return tf.while_loop(lambda i, _: i < count, lambda i, a: (i + 1, step(i, a)), (0, first))[1]

    if where == "nested":
        return loop(lambda _, a: loop(lambda _, b: tf.tanh(b @ w), a, 2))
    if where == "rows":
        return loop(lambda i, a: tf.tanh((a + tf.gather(table, [i])) @ w))
    if where == "in a branch":
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: loop(lambda _, a: tf.tanh(a @ w)), lambda: x @ w)
    if where == "a branch within":
        return loop(lambda i, a: tf.cond(i % 2 > 0, lambda: tf.tanh(a @ w), lambda: a))
    if where == "its shape":
        return loop(lambda _, a: tf.tanh(a @ w), count=tf.shape(w)[0])
    if where == "after a write":
        w.assign_add(0.01 * tf.ones_like(w))
    if where == "with its slot":
        return loop(lambda _, a: tf.tanh(a @ (w + m)))
    return loop(lambda _, a: tf.tanh(a @ w))


@pytest.mark.parametrize(
    ("where", "strategy"),
    covering(
        ["plain", "nested", "rows", "in a branch", "a branch within", "its shape", "after a write", "with its slot"],
        ["FSDP", "PartitionedPS", "PartitionedAR"],
    ),
)
def test_variables_that_loops_read_are_cut_and_gathered_before_the_loops(where: str, strategy: str) -> None:
    w, table = (tf.Variable(np.linspace(-1, 1, 4 * rows).reshape(rows, 4), name=f"v{rows}") for rows in (4, 5))
    m = tf.Variable(np.zeros((4, 4)), name="m", trainable=False)

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_reads_in_loops(where, w, m, table, x) ** 2)
        slope, rows = tape.gradient(loss, [w, table])
        w.assign_sub(0.1 * m.assign(0.9 * m + slope))
        if rows is not None:
            table.assign_sub(0.1 * tf.convert_to_tensor(rows))
        return loss

    item = ar.GraphItem.from_function(train, tf.TensorSpec([None, 4], tf.float64))
    config = {"devices": [f"CPU:{i}" for i in range(3)], "strategy": {"name": strategy}}
    new = ar.rewrite(item, config)
    expected = {"v4", "m", "v5"} if where == "rows" else {"v4", "m"}
    assert {name for name, one in new.variables.items() if one.shards is not None} == expected
    assert any(note.startswith("'v4' is gathered for the loop") for note in new.report.plan.notes)
    report = ar.verify(item, config)
    assert report.ok, report


def test_slots_that_loops_read_are_read_in_the_order_of_the_item_in_every_process() -> None:
    kinds = (("w", True), ("slot", False))
    weights, slots = (
        [tf.Variable(np.full((4, 4), 0.1), name=f"{name}{i}", trainable=trained) for i in range(7)]
        for name, trained in kinds
    )

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            total = tf.add_n(weights)
            seen = tf.while_loop(
                lambda i, _: i < 2, lambda i, a: (i + 1, tf.tanh(a @ (total + tf.add_n(slots)))), (0, x)
            )
            loss = tf.reduce_mean(seen[1] ** 2)
        rate, momentum = tf.constant(0.1, tf.float64), tf.constant(0.9, tf.float64)
        for weight, slot, slope in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            handles = {"var": weight.handle, "accum": slot.handle}
            tf.raw_ops.ResourceApplyMomentum(**handles, lr=rate, grad=slope, momentum=momentum)
        return loss

    item = ar.GraphItem.from_function(train, tf.TensorSpec([None, 4], tf.float64))
    new = ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "FSDP"}})
    said = [note.split("'")[1] for note in new.report.plan.notes if "is gathered for the loop 'while'" in note]
    assert said == [name for name in item.variables if name.startswith("slot")]


def _write_elements(how: str, v: Any, x: Any, slope: Any, loss: Any) -> None:
    if how == "a row":
        v[2].assign(tf.reduce_mean(x, 0))
    elif how == "a column":
        v[:, 1].assign(tf.reduce_sum(slope, 1))
    elif how == "every other":
        v[::2, 1:].assign(v[::2, 1:] * 0.5)
    elif how == "one after another":
        v[0].assign(tf.zeros_like(v[0]))
        v[0, 1:].assign(tf.ones_like(v[0, 1:]))
    elif how == "in a branch":
        tf.cond(loss > 0, lambda: v[0].assign(tf.zeros_like(v[0])), lambda: v[1].assign(tf.zeros_like(v[0])))
    elif how == "scatter_nd_update":
        v.scatter_nd_update([[1, 2], [3, 0]], [5.0, 6.0])
    else:
        v.scatter_nd_add([[1], [3]], tf.stack([x[0], x[1]]) * 0.1)


@pytest.mark.parametrize(
    ("how", "mode"),
    covering(
        ["a row", "a column", "every other", "one after another", "in a branch", "scatter_nd_update", "scatter_nd_add"],
        ["shared", "mirrored"],
    ),
)
def test_elements_are_written_into_a_variable_in_shards(how: str, mode: str) -> None:
    v = tf.Variable(np.linspace(-1, 1, 16).reshape(4, 4), name="v")

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ v) ** 2)
        slope = tape.gradient(loss, v)
        v.assign_sub(0.1 * slope)
        _write_elements(how, v, x, slope, loss)
        return loss + tf.reduce_sum(v.read_value())

    item = ar.GraphItem.from_function(train, tf.TensorSpec([None, 4], tf.float64))
    config = {"devices": [f"CPU:{i}" for i in range(3)], "strategy": {"name": "FSDP", "variables": mode}}
    assert ar.rewrite(item, config).variables["v"].shards is not None
    report = ar.verify(item, config)
    assert report.ok, report


def test_a_slot_that_a_loop_writes_is_cut_with_its_variable() -> None:
    w = tf.Variable(np.linspace(-1, 1, 16).reshape(4, 4), name="w")
    m = tf.Variable(np.zeros((4, 4)), name="m", trainable=False)

    def train(x: Any) -> Any:
        def body(i: Any, a: Any) -> Any:
            m.assign_add(tf.ones_like(m))
            return i + 1, tf.tanh(a @ (w + 0.01 * m))

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.while_loop(lambda i, _: i < 3, body, (0, x))[1] ** 2)
        w.assign_sub(0.1 * m.assign(0.9 * m + tape.gradient(loss, w)))
        return loss

    item = ar.GraphItem.from_function(train, tf.TensorSpec([None, 4], tf.float64))
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "FSDP"}}
    new = ar.rewrite(item, config)
    assert {name for name, one in new.variables.items() if one.shards is not None} == {"w", "m"}
    report = ar.verify(item, config)
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["FSDP", "PartitionedPS", "PartitionedAR"])
def test_a_variable_that_a_loop_writes_is_cut_and_each_iteration_writes_its_shards(strategy: str) -> None:
    w = tf.Variable(np.ones((4, 4)), name="w")

    def train(x: Any) -> Any:
        def body(i: Any, a: Any) -> Any:
            w.assign_sub(0.01 * tf.reduce_mean(a, 0) * tf.ones_like(w))
            return i + 1, tf.tanh(a @ w)

        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 2, body, (0, x))[1])

    item = ar.GraphItem.from_function(train, tf.TensorSpec([None, 4], tf.float64))
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy}}
    assert ar.rewrite(item, config).variables["w"].shards is not None
    report = ar.verify(item, config)
    assert report.ok, report


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
