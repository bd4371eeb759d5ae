"""Collectives that ask for NCCL are on GPUs, of its types, and in one order on each device of every rank."""

from __future__ import annotations

from functools import cache

import pytest

import autograph_rewrite as ar
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.verify.nccl import uses_nccl
from autograph_rewrite.ir.verify.ranks import verify_ranks
from autograph_rewrite.normalize.normalize import normalise
from tests.support.rank_jobs import item_of


@cache
def rewritten(model: str) -> tuple[ar.GraphItem, tuple[ar.GraphItem, ...]]:
    """The item, and what two processes with two GPUs each make of it."""
    item = item_of(model)
    config = {
        "devices": ["GPU:0", "GPU:1"],
        "cluster": {"workers": ["127.0.0.1:1", "127.0.0.1:2"]},
        "strategy": {"name": "AllReduce", "variables": "mirrored", "hint": "nccl", "bucket_bytes": 64},
    }
    return normalise(item), tuple(ar.rewrite(item, config, task=task) for task in range(2))


def problems(model: str, graphs: list[Graph]) -> list[str]:
    return [fault.problem for fault in verify_ranks(graphs, rewritten(model)[0])]


def ranks(model: str = "mlp") -> list[Graph]:
    return [item.graph.clone() for item in rewritten(model)[1]]


def asking(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op.startswith("Collective") and uses_nccl(node)]


@pytest.mark.parametrize("model", ["mlp", "cond_v1", "lstm_v2"])
def test_collectives_of_a_rewrite_are_in_one_order_on_all_ranks(model: str) -> None:
    graphs = ranks(model)
    assert len(asking(graphs[0])) > 4
    assert problems(model, graphs) == []


def test_two_collectives_that_do_not_wait_for_each_other_are_refused() -> None:
    graphs = ranks()
    for node in asking(graphs[1]):
        for control in node.controls:
            node.remove_control(control)
    found = problems("mlp", graphs)
    assert any("in any order" in problem and "of rank 1" in problem for problem in found), found


def test_a_type_that_nccl_lacks_is_refused() -> None:
    graphs = ranks()
    for graph in graphs:
        for node in asking(graph)[:1]:
            sent = node.inputs[0]
            other = graph.add("Cast", [sent], name="other", attrs={"DstT": dtypes.COMPLEX64}, device=node.device)
            node.set_input(0, other.output())
    assert any("NCCL has no type for" in problem for problem in problems("mlp", graphs))


def test_a_member_on_a_cpu_is_refused() -> None:
    graphs = ranks()
    node = asking(graphs[0])[0]
    node.set_device(node.device.replace("GPU", "CPU"))
    assert any("asks for NCCL, and is on" in problem for problem in problems("mlp", graphs))


def test_rings_are_not_chained() -> None:
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored", "hint": "ring"}}
    graph = ar.rewrite(item_of("mlp"), config).graph
    assert not [node for node in graph if node.op.startswith("Collective") and node.controls]
