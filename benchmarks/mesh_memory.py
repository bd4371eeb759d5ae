"""The cost model on a mesh: bytes of each logical device, as predicted and as TensorFlow's allocator records them.

The peak is the median of some traced steps beside what is always there: variables, and what is fed. Four models that a
person has cut, on 1 x 2, 1 x 4 and 2 x 2 virtual CPU devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from benchmarks.child import call
from benchmarks.cost import allocated, handle_bytes, traced
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.mesh_models import MODELS
from benchmarks.remat import Built

TITLE = "memory on a mesh: virtual CPU devices, Session"
MESHES = ((1, 2), (1, 4), (2, 2))
BATCHES = {"layers": 512, "transformer": 32, "images": 64, "experts": 512}
PEAKS = 5
SERIAL = frozenset(("images",))
"""The gradients of a convolution hold tens of MiB where TensorFlow's kernels are its own, and which of them overlap
differs from step to step: nodes run one after another."""


class Measured(NamedTuple):
    """The bytes of one device.

    Attributes:
        device: its name.
        variables: predicted, and as the graph has them.
        peak: predicted, and measured.
    """

    device: str
    variables: tuple[float, float]
    peak: tuple[float, float]


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for model in effort.some(list(MODELS)):
        for data, devices in MESHES:
            found = call(
                "benchmarks.mesh_memory:measure", {"model": model, "data": data, "devices": devices}, timeout=300
            )
            one = f"{model}, {data} x {devices}"
            details[one] = found
            apart = max(found, key=lambda device: abs(device[2][0] / device[2][1] - 1))
            error = abs(apart[2][0] / apart[2][1] - 1)
            how = f"{apart[0]}: {apart[2][0] / 2**20:.2f} MiB predicted, {apart[2][1] / 2**20:.2f} measured"
            figures.append(Figure(f"{one}: peak of a device, worst error", error, at_most=0.1, how=how))
            wrong = sum(device[1][0] != device[1][1] for device in found)
            figures.append(Figure(f"{one}: devices whose variables take other bytes", float(wrong), at_most=0.0))
    return figures, details


def measure(model: str, data: int, devices: int) -> list[Measured]:
    """Return the bytes of the devices of a mesh (in a child)."""
    from benchmarks import contestants

    contestants.split_cpu(data * devices)
    return list(measured(model, data, devices, BATCHES[model]))


def measured(model: str, data: int, devices: int, batch: int) -> Iterator[Measured]:
    """Yield the bytes of the devices of a mesh.

    Args:
        model: one of `MODELS`.
        data: how many replicas there are.
        devices: of each replica.
        batch: examples.
    """
    import autograph_rewrite as ar
    from autograph_rewrite.cost.hardware.machine import Machine

    chosen = MODELS[model]
    item, feeds = chosen.item(batch), chosen.feeds(batch)
    new = ar.rewrite(item, chosen.config(data, devices))
    machine = replace(Machine(), cores=os.cpu_count() or 1)
    found = ar.simulate(item, new.report.plan, machine=machine)
    yield from beside(found, new, feeds, item, serial=model in SERIAL)


def beside(found: Any, new: Any, feeds: Any, item: Any, *, serial: bool = False) -> Iterator[Measured]:
    """Yield what is predicted of each device, and what is measured.

    Args:
        found: the simulation.
        new: the rewritten item.
        feeds: one batch.
        item: as its user made it.
        serial: nodes run one after another.
    """
    from autograph_rewrite.ir.types.device_names import short

    kept: dict[str, int] = {}
    for node in new.graph:
        if node.op == "VarHandleOp":
            device = short(node.device) if node.device else "CPU:0"
            kept[device] = kept.get(device, 0) + handle_bytes(node)
    steps = traced(new, Built(item), feeds, PEAKS, serial=serial)
    for use in found.devices:
        fed = sum(value.nbytes for value in feeds.values()) if use.name == "CPU:0" else 0
        own = kept.get(use.name, 0)
        peak = median(allocated(stats, new, use.name) for stats in steps) + own + fed
        yield Measured(use.name, (use.variable_bytes, own), (use.peak_bytes, peak))
