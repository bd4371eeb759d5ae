"""A diff names what a rewrite did, node by node, and groups the copies."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.inspect.diff import Change, Diff
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.protos import proto
from tests.support.golden_text import check_golden
from tests.support.small_items import mirrored, regression


def test_the_diff_of_a_rewrite_is_as_it_was() -> None:
    check_golden("diff_mirrored.txt", str(ar.diff(regression(), mirrored())))


def test_a_graph_does_not_differ_from_itself() -> None:
    found = ar.diff(regression(), serde.to_bytes(regression().graph))
    assert not found
    assert str(found) == "no differences\n"


def test_copies_are_grouped_under_their_original() -> None:
    found = ar.diff(regression(), mirrored())
    assert found.copied["gradient"] == ("replica_0/gradient", "replica_1/gradient")
    assert found.copied["w"] == ("w", "replica_1/w")
    assert "replica_1/w" not in found.added
    assert "replica_0/gradient/all_reduce" in found.added
    assert found.removed == {}
    assert found.made_by == {"lower-reshards": 8}


def test_what_merges_the_copies_under_the_original_name_is_added() -> None:
    found = ar.diff(regression(), mirrored())
    assert found.copied["loss"] == ("replica_0/loss", "replica_1/loss")
    assert "AddN" in found.added["loss"]


def test_copies_that_read_their_own_replica_are_not_rewired() -> None:
    found = ar.diff(regression(), mirrored())
    assert {change.node for change in found.rewired} == {"y", "gradient", "update"}
    assert Change("update", "input 3", "%gradient", "%gradient/all_reduce") in found.rewired
    assert Change("gradient", "input 0", "%x", "%x/block") in found.rewired


def test_the_shared_name_of_a_copy_is_no_change() -> None:
    assert ar.diff(regression(), mirrored()).changed == ()


def edited(edit: Callable[[Graph], object]) -> Diff:
    graph = regression().graph
    edit(graph)
    return ar.diff(regression().graph, graph)


def test_each_kind_of_edit_is_told_apart() -> None:
    added = edited(lambda g: g.add("NoOp", name="extra"))
    assert dict(added.added) == {"extra": "%extra = NoOp()"}
    removed = edited(lambda g: g.erase(g.node("loss")))
    assert list(removed.removed) == ["loss"]
    moved = edited(lambda g: g.node("y").set_device("/device:CPU:1"))
    assert moved.moved == (Change("y", "device", "", "/device:CPU:1"),)
    assert "(anywhere) -> CPU:1: y" in str(moved)
    rewired = edited(lambda g: g.node("loss").set_input(0, g.value("y")))
    assert rewired.rewired == (Change("loss", "input 0", "%squares", "%y"),)
    waiting = edited(lambda g: g.node("loss").add_control(g.node("x")))
    assert str(waiting.rewired[0]) == "loss: control edges was unset, is ^x"
    value = edited(lambda g: g.node("rate").set_attr("value", np.float32(0.2)))
    assert value.changed == (Change("rate", "value", "0.1", "0.2"),)
    for one in (added, removed, moved, rewired, waiting, value):
        assert sum(map(bool, (one.added, one.removed, one.moved, one.rewired, one.changed))) == 1


def test_a_changed_op_is_one_change() -> None:
    def edit(graph: Graph) -> None:
        y = graph.node("y")
        square = graph.add("Abs", [y.output()], name="new")
        graph.node("squares").output().replace_all_uses_with(square.output())
        graph.erase(graph.node("squares"))
        graph.nodes["squares"] = square
        square.name = "squares"
        del graph.nodes["new"]

    assert edited(edit).changed == (Change("squares", "op", "Square", "Abs"),)


def test_another_order_of_the_same_nodes_is_told() -> None:
    def edit(graph: Graph) -> None:
        graph.nodes = dict(reversed(graph.nodes.items()))

    found = edited(edit)
    assert found
    assert str(found) == "the same nodes, in another order\n"


def test_changed_functions_are_told() -> None:
    def with_function(name: str, nodes: int) -> Graph:
        library = proto("FunctionDefLibrary")()
        function = library.function.add()
        function.signature.name = name
        for i in range(nodes):
            function.node_def.add(name=f"n{i}", op="NoOp")
        graph = regression().graph
        graph.library = library.SerializeToString()
        return graph

    assert ar.diff(with_function("f", 1), with_function("f", 1)).library == ()
    (changed,) = ar.diff(with_function("f", 1), with_function("f", 2)).library
    assert changed.startswith("function f: 1 nodes")
    assert " -> function f: 2 nodes" in changed
    assert [text[:12] for text in ar.diff(with_function("f", 1), with_function("g", 1)).library] == [
        "- function f",
        "+ function g",
    ]


def test_a_node_that_is_named_like_a_copy_of_nothing_is_just_added() -> None:
    found = edited(lambda g: g.add("NoOp", name="replica_3/nothing"))
    assert list(found.added) == ["replica_3/nothing"]
    assert found.copied == {}


def test_a_large_diff_prints_shortly_and_is_whole_as_data() -> None:
    def edit(graph: Graph) -> None:
        for i in range(1000):
            graph.add("Const", name=f"c{i}", attrs={"value": np.float32(i), "dtype": dtypes.FLOAT})

    found = edited(edit)
    assert len(str(found).splitlines()) == 22
    assert "... and 980 more" in str(found)
    assert len(json.loads(json.dumps(found.data()))["added"]) == 1000


@pytest.mark.parametrize("field", ["added", "removed", "copied", "rewired", "moved", "changed", "functions", "made_by"])
def test_data_has_every_section(field: str) -> None:
    assert field in ar.diff(regression(), mirrored()).data()
