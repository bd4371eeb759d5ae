"""Which lowering a sum is given: what processes, devices, hints and compressors make of it."""

from __future__ import annotations

from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.load.sources.printed import from_printed
from tests.passes.collectives.test_lowerings import CASE

TWO = {"cluster": {"workers": ["a:1", "b:1"]}}
CPUS, GPUS = {"devices": ["CPU:0", "CPU:1"]}, {"devices": ["GPU:0", "GPU:1"]}


@pytest.mark.parametrize(
    ("config", "lowering"),
    [
        ({**CPUS, **TWO}, "host_reduce"),
        ({**CPUS, **TWO, "microbatches": 2}, "host_reduce"),
        ({**CPUS, **TWO, "strategy": {"hint": "ring"}}, "collective_reduce"),
        ({**CPUS, **TWO, "strategy": {"compressor": "fp16"}}, "collective_reduce"),
        ({**GPUS, **TWO}, "collective_reduce"),
        ({"devices": ["CPU:0"], **TWO}, "collective_reduce"),
        ({**CPUS, "strategy": {"variables": "mirrored"}}, "collective_reduce"),
    ],
    ids=["cpus", "micro-batches", "ring", "compressor", "gpus", "one each", "one process"],
)
def test_replicas_of_one_memory_add_up_before_processes_do(config: dict[str, Any], lowering: str) -> None:
    plan = ar.build_plan(from_printed(CASE, {}), config)
    assert [edge.lowering for edge in plan.edges if edge.owner == "w"] == [lowering]
