"""Under which conditions nodes run: the branches that Switch opens, the loops that Enter opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from autograph_rewrite.ir.control_flow import frames_of, guards_of, unconditional_nodes
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import topological_order
from tests.zoo.training import control_flow

v1 = tf.compat.v1


def built(build: Callable[[], Any]) -> Graph:
    graph = tf.Graph()
    with graph.as_default(), control_flow(v2=False):
        build()
    return serde.from_bytes(graph.as_graph_def().SerializeToString())


def guards(graph: Graph, name: str) -> set[tuple[str, bool]]:
    order = topological_order(graph)
    found = guards_of(order, frames_of(order))
    return {(guard.predicate.name, guard.taken) for guard in found.get(graph.node(name), ())}


def unconditional(graph: Graph) -> set[str]:
    return {node.name for node in unconditional_nodes(topological_order(graph))}


def branches() -> None:
    x, p, q = (v1.placeholder(t, [], name=n) for n, t in (("x", tf.float32), ("p", tf.bool), ("q", tf.bool)))

    def yes() -> tf.Tensor:
        inner = tf.cond(q, lambda: tf.sin(x, name="sin"), lambda: tf.cos(x, name="cos"))
        return tf.exp(inner, name="exp")

    tf.negative(tf.cond(p, yes, lambda: tf.tanh(x, name="tanh")), name="after")


def test_a_node_in_a_branch_is_guarded_by_its_predicate() -> None:
    graph = built(branches)
    assert guards(graph, "cond/exp") == {("p", True)}
    assert guards(graph, "cond/tanh") == {("p", False)}


def test_a_node_in_a_branch_of_a_branch_is_guarded_by_both() -> None:
    graph = built(branches)
    assert guards(graph, "cond/cond/sin") == {("p", True), ("q", True)}
    assert guards(graph, "cond/cond/cos") == {("p", True), ("q", False)}


def test_what_follows_a_merge_always_runs() -> None:
    graph = built(branches)
    assert guards(graph, "after") == set()
    assert {"after", "cond/Merge", "x", "p"} <= unconditional(graph)
    assert not {"cond/exp", "cond/cond/sin", "cond/tanh"} & unconditional(graph)


def loop() -> None:
    x = v1.placeholder(tf.float32, [], name="x")

    def body(i: Any, total: Any) -> tuple[Any, Any]:
        return i + 1, tf.cond(tf.equal(i, 1), lambda: tf.exp(total, name="exp"), lambda: tf.sin(total, name="sin"))

    _, total = v1.while_loop(lambda i, _: i < 3, body, [tf.constant(0), x], name="loop")
    tf.negative(total, name="after")


def test_a_node_in_a_loop_is_guarded_by_its_condition_and_what_leaves_is_not() -> None:
    graph = built(loop)
    order = topological_order(graph)
    frames = frames_of(order)
    inside = next(node for node in order if node.name.endswith("/exp"))
    assert len(frames[inside]) == 1
    assert {name.rpartition("/")[2] for name, taken in guards(graph, inside.name) if taken} == {"Less", "Equal"}
    assert guards(graph, "after") == set()
    assert "after" in unconditional(graph)
    assert inside.name not in unconditional(graph)


def test_a_merge_does_not_mind_what_it_waits_for() -> None:
    """TensorFlow runs a Merge although what it waits for did not run: it only has to be decided."""
    graph = built(branches)
    graph.node("cond/Merge").add_control(graph.node("cond/exp"))
    assert guards(graph, "cond/Merge") == set()


def test_whatever_else_waits_for_a_branch_runs_with_it() -> None:
    graph = built(branches)
    graph.node("after").add_control(graph.node("cond/exp"))
    assert guards(graph, "after") == {("p", True)}
