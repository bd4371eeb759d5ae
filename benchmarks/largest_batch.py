"""Rematerialisation at scale: the largest batch that fits, and the peak of each stage of a pipeline.

The limit is the peak of the 24 blocks of `benchmarks.remat` as they are, for 8 examples. With `budget` the batch grows
until no step fits it. The stages run under 1f1b on one virtual CPU device each. Offload has no figure here: on a CPU
there is nowhere to move to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks import contestants
from benchmarks.child import call
from benchmarks.cost import allocated, traced
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.remat import Built, _item, _transformer

TITLE = "rematerialisation at scale: virtual CPU devices, Session"
EXAMPLES = 8
STEPS = (24, 32, 40, 48, 64, 80, 96, 128)
"""Batches that are tried."""
PEAKS = 3
STAGED: Mapping[str, Mapping[str, Any]] = {"none": {}, "sqrt": {"remat": {"policy": "sqrt"}}}


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers that they are made of."""
    found = call("benchmarks.largest_batch:measure", {"tiny": effort.tiny}, timeout=1800)
    stages = call("benchmarks.largest_batch:measure_stages", {"tiny": effort.tiny}, timeout=1800)
    how = (
        f"{found['batch']} examples: {_mib(found['peak'])} measured, {_mib(found['predicted'])} predicted; "
        f"{EXAMPLES} as they are: {_mib(found['limit'])}"
    )
    figures = [
        Figure("transformer: largest batch with budget / as it is", found["batch"] / EXAMPLES, at_least=3.0, how=how),
        Figure("transformer: measured peak of it / limit", found["peak"] / found["limit"], at_most=1.05),
    ]
    for way, devices in stages.items():
        shown = ", ".join(f"{_mib(one['predicted'])} predicted {_mib(one['peak'])} measured" for one in devices)
        worst = max(abs(one["predicted"] / one["peak"] - 1) for one in devices)
        figures.append(
            Figure(f"1f1b, remat {way}: predicted peak of a stage, worst error", worst, at_most=0.1, how=shown)
        )
    return figures, {"batch": found, "stages": stages}


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def measure(tiny: bool) -> dict[str, float]:
    """Return the largest batch that fits, the limit, and the peaks of that batch (in a child)."""
    import autograph_rewrite as ar
    from autograph_rewrite.errors import PlanError

    plain, feeds = _built(tiny, EXAMPLES)
    limit = _measured(ar.rewrite(plain, {"devices": ["CPU:0"]}), plain, feeds)["CPU:0"]
    found = {"batch": EXAMPLES, "limit": limit, "peak": limit, "predicted": limit}
    for batch in STEPS[:2] if tiny else STEPS:
        item, feeds = _built(tiny, batch)
        try:
            new = ar.rewrite(item, {"devices": ["CPU:0"], "remat": {"policy": f"budget:{int(limit)}"}})
        except PlanError:
            break
        peaks = new.report.recomputed.peaks
        peak = _measured(new, item, feeds)["CPU:0"]
        found |= {"batch": batch, "peak": peak, "predicted": peaks.after if peaks is not None else 0}
    return found


def measure_stages(tiny: bool) -> dict[str, list[dict[str, float]]]:
    """Return predicted and measured peaks of each stage, without and with recomputation (in a child)."""
    import autograph_rewrite as ar
    from autograph_rewrite.cost.hardware.machine import Machine

    contestants.split_cpu(2)
    machine = replace(Machine(), cores=os.cpu_count() or 1)
    item, feeds = _built(tiny, EXAMPLES)
    devices, found = ["CPU:0", "CPU:1"], {}
    for way, more in STAGED.items():
        new = ar.rewrite(item, {"devices": devices, "pipeline": {"stages": 2, "microbatches": 4}, **more})
        uses = ar.simulate(item, new.report.plan, machine=machine).devices
        measured = _measured(new, item, feeds, devices)
        found[way] = [
            {"predicted": float(use.peak_bytes), "peak": measured[device]}
            for use, device in zip(uses, devices, strict=True)
        ]
    return found


def _built(tiny: bool, batch: int) -> tuple[Any, dict[str, Any]]:
    """Return the transformer for so many examples, and one batch."""
    import tensorflow as tf

    build, feeds = _transformer(tiny, batch)
    return _item(tf, lambda: build(lambda block: block)), feeds


def _measured(new: Any, item: Any, feeds: Mapping[str, Any], devices: Any = ("CPU:0",)) -> dict[str, float]:
    """Return the peak of each device: its variables, what is fed on the first one, and what a step makes."""
    from autograph_rewrite.ir.types.device_names import short
    from benchmarks.cost import handle_bytes

    held = dict.fromkeys(devices, 0.0)
    for node in new.graph:
        if node.op == "VarHandleOp":
            held[short(node.device) if node.device else devices[0]] += handle_bytes(node)
    held[devices[0]] += sum(value.nbytes for value in feeds.values())
    stats = traced(new, Built(item), feeds, PEAKS)
    return {device: held[device] + min(allocated(one, new, device) for one in stats) for device in devices}
