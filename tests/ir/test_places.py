"""Places: coordinates of nodes on axes on which they have no instances, and the devices that they mean."""

from __future__ import annotations

import pytest

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.format import printer
from autograph_rewrite.ir.format.parser import parse
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import ANYWHERE, EACH, MODEL, ONCE, PROCESS, REPLICA, SERVER, STAGE, Axis, Mesh
from autograph_rewrite.ir.types import dtypes


def placed() -> Node:
    """Return a node of the second stage that each replica runs."""
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT}, span=EACH).output()
    return graph.add("Neg", [x], name="y", span=EACH, place={STAGE: 1})


def test_a_node_stands_anywhere_until_somebody_places_it() -> None:
    node = placed().inputs[0].node
    assert node.place is ANYWHERE
    node.put(SERVER, 2)
    assert node.place == {SERVER: 2}
    assert ANYWHERE == {}


def test_a_coordinate_is_added_to_the_others_and_taken_away_alone() -> None:
    node = placed()
    node.put(SERVER, 0)
    assert node.place == {STAGE: 1, SERVER: 0}
    node.leave(STAGE)
    node.leave(STAGE)
    assert node.place == {SERVER: 0}


def test_a_change_of_place_is_an_edit_and_the_same_place_again_is_none() -> None:
    node = placed()
    before = node.graph.edits
    node.put(STAGE, 1)
    assert node.graph.edits == before
    node.put(STAGE, 0)
    assert node.graph.edits == before + 1


def test_what_a_worker_runs_for_the_whole_job_is_on_a_process() -> None:
    node = placed()
    assert not node.is_driven
    node.put(PROCESS, 0)
    assert node.is_driven


def test_a_copy_runs_as_often_and_stands_where_the_node_does() -> None:
    node = placed()
    copy = copy_node(node.graph, node, node.inputs, name="again")
    assert (copy.span, copy.place) == (EACH, {STAGE: 1})
    copy.put(STAGE, 0)
    assert node.place == {STAGE: 1}, "places are not shared once one of them changes"


def test_a_copy_of_a_graph_has_the_places_of_its_nodes() -> None:
    copy = placed().graph.clone()
    assert copy.node("y").place == {STAGE: 1}
    assert copy.node("x").place is ANYWHERE


def test_a_builder_puts_what_it_adds_where_it_is_told_to() -> None:
    node = placed()
    build = Builder(node.graph, "helper", node, node.span, place=node.place)
    assert build.op("Neg", node.output()).node.place == {STAGE: 1}
    assert Builder.at(node).op("Neg", node.inputs[0], what="more").node.place is ANYWHERE


def test_the_full_form_has_places_and_the_short_one_has_not() -> None:
    node = placed()
    node.put(PROCESS, 0)
    full = printer.render(node.graph, full=True)
    assert "each process=0 stage=1" in full
    again = parse(full)
    assert again.node("y").place == {STAGE: 1, PROCESS: 0}
    assert again.node("x").place == {}
    assert printer.render(again, full=True) == full
    assert "stage" not in printer.render(node.graph)


MESH = Mesh(
    (Axis(REPLICA, 2), Axis("micro", 3), Axis(STAGE, 2), Axis(MODEL, 2), Axis(SERVER, 1)),
    devices=tuple(
        f"r{replica}s{stage}m{logical}" for replica in range(2) for stage in range(2) for logical in range(2)
    ),
    shared=("server",),
)


@pytest.mark.parametrize(
    ("coordinate", "device"),
    [
        ({}, "r0s0m0"),
        ({STAGE: 1}, "r0s1m0"),
        ({REPLICA: 1, STAGE: 1, MODEL: 1}, "r1s1m1"),
        ({REPLICA: 1, "micro": 2}, "r1s0m0"),
        ({REPLICA: 1, STAGE: 1, SERVER: 0}, "server"),
    ],
    ids=str,
)
def test_a_coordinate_has_a_device(coordinate: dict[str, int], device: str) -> None:
    assert MESH.device(coordinate) == device


def test_axes_of_places_give_no_instances() -> None:
    assert MESH.count(EACH) == 6
    assert MESH.count(ONCE) == 1
