"""Which lowering a sum is given: what processes, devices, hints and compressors make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.files import from_printed
from autograph_rewrite.resolve.edges import reshard_edges
from tests.passes.collectives.test_lowerings import CASE

TWO = {"cluster": {"workers": ["a:1", "b:1"]}}
CPUS, GPUS = {"devices": ["CPU:0", "CPU:1"]}, {"devices": ["GPU:0", "GPU:1"]}


def function(text: str = CASE) -> GraphItem:
    """Return an item whose variables a function has captured."""
    item = from_printed(text, {})
    return replace(item, variables={name: replace(one, captured=True) for name, one in item.variables.items()})


@pytest.mark.parametrize(
    ("config", "lowering"),
    [
        ({**CPUS, **TWO}, "host_one_shot"),
        ({**CPUS, **TWO, "microbatches": 2}, "host_one_shot"),
        ({**CPUS, **TWO, "strategy": {"hint": "ring"}}, "collective_reduce"),
        ({**CPUS, **TWO, "strategy": {"compressor": "fp16"}}, "collective_reduce"),
        ({**GPUS, **TWO}, "collective_reduce"),
        ({"devices": ["CPU:0"], **TWO}, "one_shot_reduce"),
        ({"devices": ["CPU:0"], **TWO, "microbatches": 2}, "host_one_shot"),
        ({**CPUS, "strategy": {"variables": "mirrored"}}, "collective_reduce"),
    ],
    ids=["cpus", "micro-batches", "ring", "compressor", "gpus", "one each", "one each, micro-batches", "one process"],
)
def test_replicas_of_one_memory_add_up_before_processes_do(config: dict[str, Any], lowering: str) -> None:
    plan = ar.build_plan(function(), config)
    assert [edge.lowering for edge in plan.edges if edge.owner == "w"] == [lowering]


def _lowerings(rows: int, workers: int, wide: bool) -> list[str]:
    """Return how a gradient is summed of `rows` rows of 1 KiB, or 2 KiB, between workers."""
    text = CASE.replace("[3,2]", f"[{rows},256]").replace("[?,3]", f"[?,{rows}]")
    text = text.replace("float32", "float64") if wide else text
    cluster = {"workers": [f"host{task}:1" for task in range(workers)]}
    plan = ar.build_plan(function(text), {"devices": ["CPU:0"], "cluster": cluster})
    return [edge.lowering for edge in plan.edges if edge.owner == "w"]


@pytest.mark.parametrize(
    ("rows", "workers", "wide", "lowering"),
    [
        (512, 2, False, "one_shot_reduce"),
        (513, 2, False, "collective_reduce"),
        (256, 2, True, "one_shot_reduce"),
        (257, 2, True, "collective_reduce"),
        (144, 3, False, "one_shot_reduce"),
        (145, 3, False, "collective_reduce"),
        (64, 8, False, "one_shot_reduce"),
        (65, 8, False, "collective_reduce"),
        (1, 9, False, "collective_reduce"),
    ],
)
def test_small_sums_of_few_workers_take_one_shot(rows: int, workers: int, wide: bool, lowering: str) -> None:
    assert _lowerings(rows, workers, wide) == [lowering]


@pytest.mark.parametrize("more", [{}, {"compressor": "fp16"}])
def test_the_sums_of_a_bucket_go_the_same_way(more: dict[str, str]) -> None:
    plan = ar.build_plan(function(), {"devices": ["CPU:0"], **TWO})
    (edge,) = (edge for edge in plan.edges if edge.owner == "w")
    ring = replace(edge, lowering="collective_reduce", bucket=1)
    small, large = replace(ring, bytes=300 * 1024), replace(ring, bytes=212 * 1024)
    assert {e.lowering for e in reshard_edges.choose(plan, [small, large], lambda _: True)} == {"one_shot_reduce"}
    large = replace(large, bytes=213 * 1024, **more)
    assert {e.lowering for e in reshard_edges.choose(plan, [small, large], lambda _: True)} == {"collective_reduce"}
    assert reshard_edges.choose(plan, [small], lambda _: False) == [small]


def test_a_sum_of_a_type_that_no_gather_knows_goes_around_the_ring() -> None:
    text = CASE.replace("Sum(", "Max(").replace("float32", "bfloat16")
    edges = ar.build_plan(function(text), {"devices": ["CPU:0"], **TWO}).edges
    assert [edge.lowering for edge in edges if edge.value == "loss"] == ["collective_reduce"]


def test_sessions_go_around_the_ring() -> None:
    edges = ar.build_plan(from_printed(CASE, {}), {"devices": ["CPU:0"], **TWO}).edges
    assert [edge.lowering for edge in edges if edge.owner == "w"] == ["collective_reduce"]
