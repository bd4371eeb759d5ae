"""Orders and reachability."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, descendants, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes


def diamond() -> tuple[Graph, Node, Node, Node, Node]:
    """Return `a`, `b(a)`, `c(a)` and `d(b) ^c`, inserted in an unhelpful order."""
    graph = Graph()
    a = graph.add("Const", name="a", attrs={"value": 1.0, "dtype": dtypes.FLOAT})
    d = graph.add("Neg", [a.output()], name="d")
    c = graph.add("Neg", [a.output()], name="c")
    b = graph.add("Neg", [a.output()], name="b")
    d.set_input(0, b.output())
    d.add_control(c)
    return graph, a, b, c, d


def names(nodes: object) -> list[str]:
    return [node.name for node in nodes]  # type: ignore[attr-defined]


def test_producers_come_before_readers_and_waiters() -> None:
    graph, *_ = diamond()
    assert names(topological_order(graph)) == ["a", "b", "c", "d"]
    assert names(topological_order(graph)) == names(topological_order(graph.clone()))


def test_a_cycle_is_reported_with_all_its_nodes() -> None:
    graph, _, b, _, d = diamond()
    b.add_control(d)
    with pytest.raises(GraphError, match=r"cycle: (d -> b -> d|b -> d -> b)"):
        topological_order(graph)


def test_a_node_that_waits_for_itself_is_a_cycle() -> None:
    graph, *_, d = diamond()
    d.add_control(d)
    with pytest.raises(GraphError, match="cycle: d -> d"):
        topological_order(graph)


def test_the_back_edge_of_a_loop_is_no_cycle() -> None:
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as original:
            tf.while_loop(lambda i: i < 3, lambda i: [i + 1], [tf.constant(0)])
    finally:
        tf.compat.v1.enable_control_flow_v2()
    graph = serde.from_bytes(original.as_graph_def().SerializeToString())
    order = topological_order(graph)
    assert len(order) == len(graph)
    back = next(node for node in graph if node.op == "NextIteration")
    merge = next(node for node in graph if node.op == "Merge")
    assert order.index(merge) < order.index(back)
    assert back in ancestors([merge]), "what a loop needs includes its body"
    assert merge in descendants([back])


def test_ancestors_and_descendants_follow_data_and_control_edges() -> None:
    _, a, b, c, d = diamond()
    assert ancestors([d]) == {a, b, c, d}
    assert ancestors([b]) == {a, b}
    assert descendants([c]) == {c, d}
    assert descendants([c], controls=False) == {c}
    assert descendants([a]) == {a, b, c, d}


def test_a_deep_graph_needs_no_recursion() -> None:
    graph = Graph()
    value = graph.add("Const", name="x", attrs={"value": 1.0, "dtype": dtypes.FLOAT}).output()
    attrs = dict(graph.add("Neg", [value], name="first").attrs)
    for i in range(20_000):
        value = graph.insert(Node(graph, f"n{i}", "Neg", "", attrs, b""), [value]).output()
    assert len(topological_order(graph)) == len(graph)
    assert len(ancestors([value.node])) == len(graph) - 1


def test_what_leaves_a_loop_waits_for_its_last_iteration():
    graph = Graph()
    start = graph.add("Const", name="start", attrs={"value": np.float32(0), "dtype": dtypes.FLOAT}).output()
    entered = graph.add("Enter", [start], name="enter", attrs={"frame_name": "loop"}).output()
    merge = graph.add("Merge", [entered, entered], name="merge").output()
    again = graph.add("LoopCond", [graph.add("Less", [merge, merge], name="less").output()], name="again").output()
    switch = graph.add("Switch", [merge, again], name="switch")
    body = graph.add("Neg", [switch.output(1)], name="body")
    step = graph.add("NextIteration", [body.output()], name="next").output()
    merge.node.set_input(1, step)
    left = graph.add("Exit", [switch.output(0)], name="exit")

    order = [node.name for node in topological_order(graph)]
    assert order.index("next") < order.index("exit")

    after = graph.add("Neg", [left.output()], name="after")
    body.add_control(after)  # the body would wait for what the loop hands out
    with pytest.raises(GraphError, match="cycle: "):
        topological_order(graph)


def test_a_cycle_is_told_in_the_order_in_which_it_runs():
    graph = Graph()
    first = graph.add("NoOp", name="first")
    second = graph.add("NoOp", name="second", controls=[first])
    third = graph.add("NoOp", name="third", controls=[second])
    first.add_control(third)

    with pytest.raises(GraphError, match="first -> second -> third -> first"):
        topological_order(graph)


def test_marks_are_joined_along_data_and_control_edges():
    graph = Graph()
    left, right = graph.add("NoOp", name="left"), graph.add("NoOp", name="right")
    both = graph.add("NoOp", name="both", controls=[left, right])

    before = marks_before(topological_order(graph), {left: 1, right: 2})

    assert before == {left: 0, right: 0, both: 3}
    assert not ancestors([both]).isdisjoint({right})
    assert ancestors([left]).isdisjoint({right})
