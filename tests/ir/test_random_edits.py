"""Whatever sequence of edits is applied to whatever graph, its edges stay the same from both ends."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes

OPS = {"Const": 0, "NoOp": 0, "Neg": 1, "AddV2": 2, "TopKV2": 2, "AddN": 3}


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> Graph:
    """Draw a DAG of float nodes with data and control edges, devices and anchors."""
    graph = Graph()
    for i in range(draw(st.integers(1, most))):
        add_node(graph, draw, f"{draw(st.sampled_from('abc'))}{i}")
    values = float_values(graph)
    if draw(st.booleans()) and values:
        graph.anchors["loss"] = draw(st.sampled_from(values))
    return graph


def float_values(graph: Graph) -> list[Value]:
    return [node.output() for node in graph if node.output_dtypes[:1] == (dtypes.FLOAT,)]


def add_node(graph: Graph, draw: st.DrawFn, name: str) -> Node:
    floats = float_values(graph)
    op = draw(st.sampled_from([op for op, count in OPS.items() if not count or floats]))
    if op == "TopKV2":
        k = graph.add("Const", name=name + "/k", attrs={"value": 1, "dtype": dtypes.INT64}).output()
        count = graph.add("Cast", [k], name=name + "/count", attrs={"DstT": dtypes.INT32}).output()
        inputs = [draw(st.sampled_from(floats)), count]
    else:
        inputs = [draw(st.sampled_from(floats)) for _ in range(OPS[op])]
    attrs = {"value": draw(st.floats(-1, 1, width=32)), "dtype": dtypes.FLOAT} if op == "Const" else None
    controls = draw(st.lists(st.sampled_from(list(graph)), max_size=2)) if len(graph) else []
    device = draw(st.sampled_from(["", "/device:CPU:0"]))
    return graph.add(op, inputs, name=name, attrs=attrs, device=device, controls=controls)


def check(graph: Graph) -> None:
    """Each edge is known at both of its ends, exactly once."""
    reads = [(value, node, i) for node in graph for i, value in enumerate(node.inputs)]
    assert all(graph.nodes[v.node.name] is v.node and v.node.output(v.index) is v for v, _, _ in reads)
    uses = [(value, *use) for node in graph for value in node.read_outputs for use in value.uses]
    assert set(reads) == set(uses)
    assert len(reads) == len(uses)
    waits = {(control, node) for node in graph for control in node.controls}
    assert waits == {(node, user) for node in graph for user in node.control_users}
    assert all(graph.nodes.get(control.name) is control for control, _ in waits)
    assert all(graph.nodes.get(v.node.name) is v.node for v in graph.anchors.values())
    assert all(name == node.name and node.graph is graph for name, node in graph.nodes.items())


@given(graphs())
def test_serde_is_exact(graph: Graph) -> None:
    data = serde.to_bytes(graph)
    again = serde.from_bytes(data)
    assert serde.to_bytes(again) == data
    assert serde.to_bytes(graph.clone()) == data
    check(again)
    assert [n.name for n in topological_order(again)] == [n.name for n in topological_order(graph)]


def edit(graph: Graph, draw: st.DrawFn) -> None:
    """Apply one random verb to random places."""
    nodes = list(graph)
    node = draw(st.sampled_from(nodes))
    floats = float_values(graph)
    verb = draw(st.sampled_from(["add", "erase", "set_input", "control", "rauw", "splice", "replace", "attr", "clone"]))
    if verb == "add":
        add_node(graph, draw, draw(st.sampled_from("abc")))
    elif verb == "erase":
        try:
            graph.erase(node)
        except GraphError:
            assert node.name in graph
    elif verb == "set_input" and node.inputs and floats:
        node.set_input(draw(st.integers(0, len(node.inputs) - 1)), draw(st.sampled_from(floats)))
    elif verb == "control":
        other = draw(st.sampled_from(nodes))
        draw(st.sampled_from([node.add_control, node.remove_control]))(other)
    elif verb == "rauw" and len(floats) > 1:
        old, new = draw(st.permutations(floats))[:2]
        old.replace_all_uses_with(new)
        assert old.uses == ()
        assert old not in graph.anchors.values()
    elif verb == "splice" and floats:
        old = draw(st.sampled_from(floats))
        new = graph.add("Identity", [old], name="spliced")
        old.replace_all_uses_with(new.output(), keep={new})
        assert old.uses == ((new, 0),)
    elif verb == "replace" and len(floats) > 1:
        old, new = draw(st.permutations(floats))[:2]
        before = serde.to_bytes(graph)
        try:
            graph.replace(old.node, new.node)
        except GraphError:
            if any(v.node is old.node for v in new.node.inputs):
                assert serde.to_bytes(graph) == before, "a refusal changes nothing"
        else:
            assert old.node.name not in graph
    elif verb == "attr":
        node.set_attr("_note", draw(st.text(max_size=3)))
    elif verb == "clone":
        check(graph.clone())


@settings(max_examples=200)
@given(graphs(), st.data())
def test_random_edits_keep_both_ends_of_every_edge(graph: Graph, data: Any) -> None:
    for _ in range(data.draw(st.integers(1, 12))):
        if not len(graph):
            break
        before = graph.edits
        edit(graph, data.draw)
        check(graph)
        assert graph.edits >= before
    serde.from_bytes(serde.to_bytes(graph))
