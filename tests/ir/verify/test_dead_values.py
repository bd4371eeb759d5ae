"""A node that waits for what never comes is refused before it runs: of both branches, or of a first iteration."""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.dead_values import on_other_devices, on_other_replicas, values_arrive

FIRST, SECOND = "/device:CPU:0", "/device:CPU:1"
FLOAT, BOOL = dtypes.FLOAT, dtypes.BOOL


def branches(graph: Graph) -> tuple[Value, Value]:
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}).output()
    p = graph.add("Placeholder", name="p", attrs={"dtype": BOOL}).output()
    switch = graph.add("Switch", [x, p], name="switch")
    return switch.output(0), switch.output(1)


def problems(graph: Graph, *known: str) -> list[str]:
    return [fault.problem for fault in values_arrive(graph, known, on_other_devices)]


def loop(graph: Graph, *, constant: bool = False) -> Node:
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT}, device=FIRST).output()
    attrs = {"frame_name": "loop", "is_constant": constant, "parallel_iterations": 10}
    return graph.add("Enter", [x], name="enter", attrs=attrs, device=FIRST)


def test_a_node_that_needs_what_both_branches_make_never_runs() -> None:
    graph = Graph()
    no, yes = branches(graph)
    added = graph.add("AddV2", [no, yes], name="sum")
    graph.add("Neg", [added.output()], name="after")

    assert problems(graph) == ["'sum' never runs: it needs what is made where 'p' is true, and where it is false"]
    assert problems(graph, "sum", "after") == []


def test_a_constant_that_waits_for_a_node_of_the_other_branch_is_told() -> None:
    graph = Graph()
    no, yes = branches(graph)
    there = graph.add("Neg", [yes], name="there")
    attrs = {"value": np.float32(2), "dtype": FLOAT}
    shared = graph.add("Const", name="shared", attrs=attrs, controls=[there]).output()
    graph.add("Mul", [yes, shared], name="here_too")
    graph.add("Mul", [no, shared], name="product")

    assert [text.split(" ")[0] for text in problems(graph)] == ["'product'"]


def test_branches_that_meet_in_a_merge_and_a_branch_inside_of_its_own_opposite_are_sound() -> None:
    graph = Graph()
    no, yes = branches(graph)
    inner = graph.add("Switch", [yes, graph.value("p:0")], name="inner")
    graph.add("Neg", [inner.output(0)], name="dead_in_the_original_too")
    graph.add("Merge", [no, inner.output(1)], name="merge")

    assert problems(graph) == []


def test_what_enters_a_loop_on_another_device_is_awaited_in_every_iteration() -> None:
    graph = Graph()
    enter = loop(graph)
    kept = graph.add("Identity", [enter.output()], name="kept", device=FIRST)
    graph.add("Neg", [kept.output()], name="negated", device=SECOND)

    text = "'negated' waits in every iteration for 'kept', which another device sends in the first one only"
    assert problems(graph) == [text]


def test_what_is_constant_in_a_loop_or_comes_from_its_merge_is_sent_in_every_iteration() -> None:
    graph = Graph()
    graph.add("Neg", [loop(graph, constant=True).output()], name="negated", device=SECOND)
    assert problems(graph) == []

    graph = Graph()
    enter = loop(graph)
    merge = graph.add("Merge", [enter.output(), enter.output()], name="merge", device=FIRST)
    graph.add("Neg", [merge.output()], name="negated", device=SECOND)
    assert problems(graph) == []


def test_a_folded_graph_shows_what_goes_from_replica_to_replica() -> None:
    graph = Graph()
    enter = loop(graph)
    reader = graph.add("Neg", [enter.output()], name="negated", span=EACH)

    assert [fault.node for fault in values_arrive(graph, (), on_other_replicas)] == [reader]
    enter.span = EACH
    assert [*values_arrive(graph, (), on_other_replicas)] == []
