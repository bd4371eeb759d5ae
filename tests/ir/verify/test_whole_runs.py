"""What is run by its name needs all members of a collective, or none: else it waits for ever."""

from __future__ import annotations

import numpy as np
import pytest

from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, MODEL, ONCE, PER_REPLICA, Mesh, PerInstance, Select, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.verify.whole_runs import check_runs, runs_are_whole

TWO = Mesh.of(2)
FOUR = Mesh.of(2, model=2)


def number(graph: Graph, name: str, value: int = 1, span: Span = ONCE) -> Node:
    return graph.add("Const", name=name, attrs={"value": np.int32(value), "dtype": dtypes.INT32}, span=span)


def all_reduce(graph: Graph, span: Span = EACH, group: Node | None = None) -> Node:
    x = graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT}).output()
    keys = [number(graph, "size", 2), group or number(graph, "group"), number(graph, "instance")]
    operands = [x, *(key.output() for key in keys)]
    attrs = {"merge_op": "Add", "final_op": "Id"}
    return graph.add("CollectiveReduceV2", operands, name="sum", attrs=attrs, span=span)


def once(graph: Graph, node: Node, select: Select = Select.FIRST, name: str = "once") -> Node:
    op, attrs = ("Identity", {}) if select is Select.FIRST else ("AddN", {"N": 2})
    return graph.add(op, [node.output()], name=name, attrs=attrs, selects={0: select})


def problems(graph: Graph, mesh: Mesh, *roots: Node) -> list[str]:
    return [fault.problem for fault in runs_are_whole(graph, mesh, roots)]


@pytest.mark.parametrize("span", [EACH, PER_REPLICA])
def test_reading_the_sum_of_the_first_replica_alone_leaves_the_others_waiting(span: Span) -> None:
    graph = Graph()
    root = once(graph, all_reduce(graph, span))

    with pytest.raises(VerifyError, match="running 'once' alone hangs: it needs 'sum' of the first replica"):
        check_runs(graph, TWO, [root])


def test_waiting_for_all_members_or_reading_all_of_them_is_sound() -> None:
    graph = Graph()
    total = all_reduce(graph)
    first, every = once(graph, total), once(graph, total, Select.ALL, "every")
    first.add_control(total)

    assert problems(graph, TWO, first, every) == []


def test_what_each_replica_makes_of_what_the_first_has_does_not_bring_the_others() -> None:
    graph = Graph()
    first = once(graph, all_reduce(graph))
    each = graph.add("Neg", [first.output()], name="each", span=EACH)

    assert len(problems(graph, TWO, once(graph, each, Select.ALL, "root"))) == 1


def test_groups_along_the_model_axis_need_the_devices_of_one_replica_only() -> None:
    graph = Graph()
    keys = number(graph, "group", span=PER_REPLICA)
    keys.set_raw_attr("value", PerInstance(tuple(encode("tensor", np.int32(k)) for k in (7, 7, 8, 8))))
    total = all_reduce(graph, group=keys)
    joined = graph.add("Neg", [total.output()], name="of_replica", span=frozenset((MODEL,)), selects={0: Select.FIRST})

    assert problems(graph, FOUR, once(graph, joined, name="cut")) == [
        "running 'cut' alone hangs: it needs 'sum' of the first model, but not of others"
    ]
    assert problems(graph, FOUR, once(graph, joined, Select.ALL, "whole")) == []


def test_a_graph_without_collectives_can_run_in_parts() -> None:
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT}).output()
    each = graph.add("Neg", [x], name="each", span=EACH)

    assert problems(graph, TWO, once(graph, each)) == []
