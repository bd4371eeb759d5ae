"""NCCL's collectives wait for each other in the order in which they are expected to be ready."""

from __future__ import annotations

from itertools import pairwise

import pytest

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, Span
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.emit.instances import order_collectives
from tests.support.small_items import INT32, const

GPU = "/device:GPU:0"


def reduced(graph: Graph, name: str, value: Value, *, hint: str = "nccl", span: Span = EACH) -> Node:
    """Add a collective."""
    keys = [const(graph, f"{name}/{key}", number, INT32) for key, number in (("size", 2), ("group", 1), ("key", 1))]
    attrs = {"merge_op": "Add", "final_op": "Id", "communication_hint": hint}
    return graph.add("CollectiveReduceV2", [value, *keys], name=name, attrs=attrs, device=GPU, span=span)


def behind(graph: Graph, value: Value, steps: int, name: str) -> Value:
    """Add a chain of ops."""
    for step in range(steps):
        value = graph.add("Neg", [value], name=f"{name}/step_{step}", span=EACH).output()
    return value


def chain(nodes: list[Node]) -> list[tuple[str, str]]:
    """The waits between collectives: (before, behind)."""
    return [(control.name, node.name) for node in nodes for control in node.controls]


@pytest.mark.parametrize("depths", [{"late": 9, "early": 2, "middle": 5}, {"early": 2, "late": 9, "middle": 5}])
def test_the_longer_the_way_to_one_the_later_it_is_in_whatever_order_they_were_made(depths: dict[str, int]) -> None:
    graph = Graph()
    x = const(graph, "x", 1.0)
    nodes = {name: reduced(graph, name, behind(graph, x, steps, f"{name}/way")) for name, steps in depths.items()}
    order_collectives(graph)
    assert {name: [node.name for node in nodes[name].controls] for name in nodes} == {
        "early": [], "middle": ["early"], "late": ["middle"],
    }  # fmt: skip


def test_one_that_reads_another_stays_behind_it() -> None:
    graph = Graph()
    first = reduced(graph, "first", behind(graph, const(graph, "x", 1.0), 4, "way"))
    second = reduced(graph, "second", first.output())
    beside = reduced(graph, "beside", behind(graph, const(graph, "y", 1.0), 9, "other"))
    order_collectives(graph)
    assert chain([first, second, beside]) == [("first", "second"), ("second", "beside")]


def test_rings_are_left_alone_and_sizes_of_processes_stay_on_the_host() -> None:
    graph = Graph()
    ring = reduced(graph, "ring", const(graph, "x", 1.0), hint="ring")
    sizes = reduced(graph, "sizes", const(graph, "rows", 4, INT32), span=ONCE)
    asking = [reduced(graph, f"asking_{i}", const(graph, f"y{i}", 1.0)) for i in range(2)]
    order_collectives(graph)
    assert sizes.attr("communication_hint") == b"auto"
    assert ring.attr("communication_hint") == b"ring"
    assert chain([ring, sizes]) == []
    assert len(chain(asking)) == 1


def test_one_in_a_branch_comes_after_what_is_ready_before_it_and_nothing_else_waits_for_it() -> None:
    graph = Graph()
    x = const(graph, "x", 1.0)
    early = reduced(graph, "early", behind(graph, x, 2, "way"))
    condition = const(graph, "condition", True, dtypes.BOOL)
    switch = graph.add("Switch", [behind(graph, x, 3, "other"), condition], name="switch", span=EACH)
    inside = reduced(graph, "inside", switch.output(1))
    merge = graph.add("Merge", [switch.output(0), inside.output()], name="merge", attrs={"N": 2}, span=EACH)
    behind_it = reduced(graph, "behind", merge.output())
    late = reduced(graph, "late", behind(graph, x, 9, "long"))
    order_collectives(graph)
    assert [node.name for node in inside.controls] == ["early"]
    free = [early, behind_it, late]
    assert all(inside not in node.controls for node in free)
    assert all(after in descendants([before]) for before, after in pairwise(free))
