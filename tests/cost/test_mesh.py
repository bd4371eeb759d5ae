"""A step on a mesh is predicted device by device: bytes as the allocator has them, FLOPs, and what crosses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autograph_rewrite as ar
from benchmarks.mesh_memory import MESHES, measured
from benchmarks.mesh_models import MODELS
from tests.support import split_models
from tests.support.covering import covering

BATCHES = {"layers": 128, "transformer": 8, "images": 16, "experts": 128}
TOLERANCE = {"experts": 0.25}
"""Einsums of experts copy their operands; which of them do so at a time differs from step to step."""


@pytest.mark.parametrize(("model", "mesh"), covering(list(MODELS), MESHES))
def test_each_device_holds_what_is_predicted(model: str, mesh: tuple[int, int]) -> None:
    for one in measured(model, *mesh, BATCHES[model]):
        assert one.variables[0] == one.variables[1], one
        assert one.peak[0] == pytest.approx(one.peak[1], rel=TOLERANCE.get(model, 0.1)), one


def simulated(config: dict[str, Any], model: str = "layers") -> Any:
    item = MODELS[model].item(64)
    return ar.simulate(item, ar.build_plan(item, config))


def test_devices_of_a_replica_share_what_is_computed_and_kept() -> None:
    chosen = MODELS["layers"]
    whole = simulated({"devices": ["CPU:0"]}).devices[0]
    for count in (2, 4):
        found = simulated(chosen.config(1, count)).devices
        assert [one.name for one in found] == [f"CPU:{k}" for k in range(count)]
        assert sum(one.variable_bytes for one in found) == whole.variable_bytes
        assert sum(one.slot_bytes for one in found) == whole.slot_bytes == whole.variable_bytes // 2
        for one in found:
            assert one.flops == pytest.approx(whole.flops / count, rel=0.05)
            assert one.activation_bytes <= whole.activation_bytes / count + 2**19


def test_what_crosses_is_told_for_each_link() -> None:
    found = simulated(MODELS["layers"].config(1, 2))
    hidden = 64 * 128 * 4  # four blocks: their input to the second device, their sum from there; the same backward
    links = {one.name: one for one in found.links}
    assert set(links) == {"CPU:0 to CPU:1", "CPU:1 to CPU:0"}
    assert [one.bytes for one in links.values()] == [7 * hidden, 7 * hidden]
    sent = [one for one in found.exchanges if one.owners == ("model axis",)]
    assert sum(one.bytes for one in sent) == 14 * hidden
    assert {event.lane for event in found.events} >= {"cpu, logical device 0", "cpu, logical device 1"}


def test_accelerators_take_turns_less_the_more_of_them_share_a_replica() -> None:
    def seconds(count: int) -> float:
        config = MODELS["layers"].config(1, count) if count > 1 else {"devices": ["GPU:0"]}
        config = {**config, "devices": [f"GPU:{k}" for k in range(count)]}
        item = MODELS["layers"].item(1 << 16)
        found = ar.simulate(item, ar.build_plan(item, config))
        assert found.devices[-1].peak_bytes > 0
        return found.step_seconds

    assert seconds(2) < seconds(1)


def test_stages_and_blocks_have_a_device_each() -> None:
    item = split_models.item()
    plan = ar.build_plan(item, split_models.config(2, 2, 2))
    found = ar.simulate(item, plan)
    assert [one.name for one in found.devices] == [f"CPU:{k}" for k in range(8)]
    together = ar.simulate(item, ar.build_plan(item, split_models.config(1, 2)))
    assert sum(one.variable_bytes for one in found.devices) == sum(one.variable_bytes for one in together.devices)


def test_a_resolved_plan_is_predicted_as_its_request_is() -> None:
    item = MODELS["layers"].item(64)
    request = ar.build_plan(item, MODELS["layers"].config(2, 2, strategy={"variables": "mirrored"}))
    resolved = ar.rewrite(item, request).report.plan
    one, other = ar.simulate(item, request), ar.simulate(item, resolved)
    assert one.step_seconds == pytest.approx(other.step_seconds)
    assert [replace(use, memory=(), holders=()) for use in one.devices] == [
        replace(use, memory=(), holders=()) for use in other.devices
    ]
