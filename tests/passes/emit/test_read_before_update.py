"""Reads that race with the update of their variable come before it; every other order stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite import GraphItem
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.emit.read_before_update import read_before_update
from tests.support.training import MODES, control_flow, distributed, placeholder, train, v1, variable

X = np.random.default_rng(0).normal(size=(6, 3))


class Step:
    """A graph under construction: variables, what reads them, what updates them, and the train op."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.one = self.graph.add("Const", name="one", attrs={"value": 1.0, "dtype": dtypes.FLOAT}).output()
        self.train = self.graph.add("NoOp", name="train")

    def variable(self, name: str) -> Value:
        attrs = {"dtype": dtypes.FLOAT, "shape": (), "shared_name": name}
        return self.graph.add("VarHandleOp", name=name, attrs=attrs).output()

    def read(self, handle: Value, name: str, *after: Node) -> Value:
        node = self.graph.add("ReadVariableOp", [handle], name=name, attrs={"dtype": dtypes.FLOAT}, controls=after)
        return node.output()

    def update(self, handle: Value, name: str, *after: Node, by: Value | None = None, in_step: bool = True) -> Node:
        node = self.graph.add("AssignAddVariableOp", [handle, by or self.one], name=name, controls=after)
        if in_step:
            self.train.add_control(node)
        return node

    def run(self, read: Value) -> None:
        """Let the step need a read."""
        self.train.add_control(self.graph.add("Neg", [read], name=f"{read.node.name}/used"))

    def order(self) -> int:
        before = [node.controls for node in self.graph]
        added = read_before_update(self.graph, [self.train])
        topological_order(self.graph)  # raises if there is a cycle
        assert added == sum(len(n.controls) - len(old) for n, old in zip(self.graph, before, strict=True))
        return added


def test_a_read_that_races_with_an_update_is_ordered_before_it() -> None:
    step = Step()
    w = step.variable("w")
    read, update = step.read(w, "read"), step.update(w, "update")
    step.run(read)
    assert step.order() == 1
    assert update.controls == (read.node,)
    assert step.order() == 0, "the second time nothing is left open"


def test_every_read_is_ordered_before_every_update_of_its_own_variable() -> None:
    step = Step()
    v, w = step.variable("v"), step.variable("w")
    again = step.graph.add("Identity", [w], name="again").output()
    reads = [step.read(handle, f"read{i}").node for i, handle in enumerate((v, w, again))]
    updates = [step.update(handle, f"update{i}") for i, handle in enumerate((v, w, again))]
    assert step.order() == 5
    assert updates[0].controls == (reads[0],)
    assert set(updates[1].controls) == set(updates[2].controls) == {reads[1], reads[2]}


@pytest.mark.parametrize("edge", ["data", "control", "far"])
def test_a_read_after_the_update_stays_after_it(edge: str) -> None:
    step = Step()
    w, v = step.variable("w"), step.variable("v")
    if edge == "data":  # the update reads what the read needs, and the read comes after another update of it
        first = step.update(w, "first")
        read = step.read(w, "read", first)
        assert step.update(w, "second", by=read).controls == ()
    else:
        first = step.update(w, "first")
        between = [step.update(v, "other", first)] if edge == "far" else [first]
        read = step.read(w, "read", *between)
    step.run(read)
    assert step.order() == 0
    assert first.controls == ()


def test_a_read_between_two_updates_stays_between_them() -> None:
    step = Step()
    w = step.variable("w")
    first = step.update(w, "first")
    read = step.read(w, "read", first)
    second = step.update(w, "second", first)
    step.run(read)
    assert step.order() == 1
    assert (first.controls, second.controls) == ((), (first, read.node))


def test_no_cycle_is_made_where_the_reads_of_two_variables_wait_for_each_other_s_updates() -> None:
    step = Step()
    v, w = step.variable("v"), step.variable("w")
    update_v, update_w = step.update(v, "update_v"), step.update(w, "update_w")
    for read in (step.read(v, "read_v", update_w), step.read(w, "read_w", update_v)):
        step.run(read)
    assert step.order() == 0
    assert (update_v.controls, update_w.controls) == ((), ())


def test_a_read_that_waits_for_another_variable_s_update_is_ordered_where_that_is_possible() -> None:
    step = Step()
    v, w = step.variable("v"), step.variable("w")
    update_v, update_w = step.update(v, "update_v"), step.update(w, "update_w")
    reads = [step.read(v, "read_v", update_w), step.read(w, "read_w")]
    assert step.order() == 2
    assert (update_v.controls, update_w.controls) == ((reads[0].node,), (reads[1].node,))


def test_an_update_that_no_step_runs_is_left_alone() -> None:
    step = Step()
    w = step.variable("w")
    initial = step.update(w, "initial", in_step=False)
    step.run(step.read(w, "read"))
    assert step.order() == 0
    assert initial.controls == ()


@pytest.mark.parametrize("fed", [False, True])
def test_a_read_that_needs_another_feed_is_not_drawn_into_the_step(fed: bool) -> None:
    step = Step()
    w = step.variable("w")
    update = step.update(w, "update")
    extra = step.graph.add("Placeholder", name="extra", attrs={"dtype": dtypes.FLOAT})
    read = step.read(w, "read", extra)
    if fed:
        step.train.add_control(extra)
    assert step.order() == int(fed)
    assert update.controls == ((read.node,) if fed else ())


def test_a_read_of_an_optimizer_s_own_variable_is_ordered_before_the_update_of_both() -> None:
    step = Step()
    w, m = step.variable("w"), step.variable("m")
    update = step.graph.add("ResourceApplyMomentum", [w, m, step.one, step.one, step.one], name="update")
    step.train.add_control(update)
    read = step.read(m, "read")
    assert step.order() == 1
    assert update.controls == (read.node,)


def looped(w: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + w.read_value()), [0, tf.zeros(3)])[1]


def branched(w: Any) -> Any:
    return tf.cond(tf.reduce_sum(tf.ones(3)) > 0, w.read_value, lambda: tf.zeros(3))


@pytest.mark.parametrize("build", [looped, branched])
def test_a_read_in_a_loop_or_a_branch_is_left_alone(build: Callable[[Any], Any]) -> None:
    """In a loop it may mean the new value; in a branch that is not taken it never happens."""
    with tf.Graph().as_default() as original, control_flow(1):
        w = v1.get_variable("w", initializer=tf.ones(3), use_resource=True)
        build(w)
        tf.group(w.assign_add(tf.ones(3)), name="train")
    (update,) = updates_after_ordering(original)
    assert {read.name for read in update.controls} <= {"w/Read/ReadVariableOp"}  # which stands outside


def test_an_update_in_a_branch_is_left_alone() -> None:
    with tf.Graph().as_default() as original, control_flow(1):
        w = v1.get_variable("w", initializer=tf.ones(3), use_resource=True)
        done = tf.cond(tf.reduce_sum(tf.ones(3)) > 0, lambda: w.assign_add(tf.ones(3)), lambda: tf.ones(3))
        tf.group(done, name="train")
    (update,) = updates_after_ordering(original)
    assert not [node for node in update.controls if node.op == "ReadVariableOp"]


def updates_after_ordering(original: Any) -> list[Node]:
    graph = serde.from_bytes(original.as_graph_def().SerializeToString())
    read_before_update(graph, [graph.node("train")])
    return [node for node in graph if node.op == "AssignAddVariableOp"]


def late_read(how: str) -> GraphItem:
    """Read a variable late in the step, whose update waits for nothing."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(1):
        x, w = placeholder("x", None, 3), variable("w", np.ones(3))
        optimizer = v1.train.MomentumOptimizer(1.0, 0.5)
        v1.train.get_or_create_global_step()
        tf.group(optimizer.apply_gradients([(tf.reduce_sum(x, 0), w)]), name="train")
        count, _ = tf.while_loop(lambda i, _: i < 30_000, lambda i, j: (i + 1, j), [0, 0], parallel_iterations=1)
        index = count - 30_000
        slot = optimizer.get_slot(w, "momentum")
        reads = {"slot": lambda: slot.read_value() + 1.0, "read": w.read_value}
        reads |= {"gather": lambda: tf.gather(w, index), "gather_nd": lambda: w.gather_nd([index])}
        with tf.control_dependencies([index]):
            tf.identity(reads[how](), name="out_seen")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["out_seen"], init_op="init")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["read", "gather", "gather_nd", "slot"])
def test_a_late_read_sees_the_value_from_before_the_step(how: str, mode: str) -> None:
    result = train(distributed(late_read(how), mode), [{"x": X}])
    (seen,) = (step["seen"] for step in result.fetched)
    np.testing.assert_array_equal(seen, np.ones_like(seen))
    np.testing.assert_allclose(result.variables["w"], 1 - X.sum(0))
