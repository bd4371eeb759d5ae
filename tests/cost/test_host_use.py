"""A simulated step on GPUs pays for what its host computes, and for what crosses to it."""

from __future__ import annotations

import autograph_rewrite as ar
from autograph_rewrite.cost.tasks.result import Simulation
from tests.inspect.test_accelerator import program

TEXT = "%text = AsString(%y)\n# output text = %text\n"


def simulated(more: str = "", device: str = "GPU", **strategy: str) -> Simulation:
    config = {
        "devices": [f"{device}:{i}" for i in range(2)],
        "strategy": {"name": "AllReduce", "variables": "mirrored", **strategy},
    }
    item = program(more)
    return ar.simulate(item, ar.build_plan(item, config), config, batch=2**20)


def links(found: Simulation) -> dict[str, int]:
    return {link["name"]: link["bytes"] for link in found.data()["links"]}


def test_each_block_crosses_to_its_device_over_a_link_of_its_own() -> None:
    found = links(simulated())
    block = 2**19 * 3 * 4
    assert block <= found["host link of first device"] < 1.01 * block
    assert found["host link of other devices"] >= block


def test_an_op_without_a_kernel_runs_on_the_host_and_its_operand_crosses() -> None:
    before, after = simulated(), simulated(TEXT)
    assert links(after)["host link of first device"] - links(before)["host link of first device"] >= 2**19 * 4
    assert after.step_seconds > before.step_seconds


def test_cpu_devices_have_no_link_to_cross() -> None:
    assert not [name for name in links(simulated(device="CPU")) if name.startswith("host link")]


def test_variables_on_the_host_are_read_over_the_link() -> None:
    assert "host link" in links(simulated(name="PS"))
    assert "host link" not in links(simulated())
