"""Auto with a memory limit: on small models, its plan beside the fastest that a person writes with a single builder.

A plan fits if what the runtime records of a step, and variables and what is fed, fit each device. Of the plans written
by hand the fastest in simulation is run first, then the next, until one fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.child import call
from benchmarks.cost import allocated, handle_bytes, traced
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.memory_limits import HANDS, LIMITED, Limited
from benchmarks.remat import Built

TITLE = "Auto with a memory limit: virtual CPU devices, Session"
BUILDERS = ("AllReduce", "PSLoadBalancing", "PartitionedPS", "Parallax", "FSDP")
SMALL = ("wide", "narrow")
"""What takes minutes; `auto_memory_large` runs the others, which takes an hour on a busy machine."""
PEAKS = 3


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers that they are made of."""
    return figures_of(effort.some(list(SMALL)))


def figures_of(models: Iterable[str]) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures of some models, and the numbers that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for model in models:
        details[model] = found = call("benchmarks.auto_memory:measure", {"model": model}, timeout=2400)
        auto, hand = found["auto"], found["hand"]
        limit = LIMITED[model].limit
        how = f"{auto['peak'] / 2**20:.1f} MiB / {limit / 2**20:.0f} MiB; predicted {auto['predicted'] / 2**20:.1f}"
        figures.append(Figure(f"{model}: measured peak, Auto / limit", auto["peak"] / limit, at_most=1.0, how=how))
        how = f"{milliseconds(auto['seconds'])} / {milliseconds(hand['seconds'])} ({hand['config']})"
        figures.append(
            Figure(f"{model}: simulated step, Auto / by hand", auto["seconds"] / hand["seconds"], at_most=1.0, how=how)
        )
    return figures, details


def measure(model: str) -> dict[str, Any]:
    """Return what Auto finds for a model, and the fastest plan by hand that fits (in a child)."""
    import autograph_rewrite as ar
    from autograph_rewrite.normalize.normalize import normalise
    from benchmarks import contestants

    limited = LIMITED[model]
    contestants.split_cpu(limited.devices)
    item, feeds = limited.item(), limited.feeds()
    config = {"devices": _devices(limited), "strategy": {"name": "Auto"}, "memory_limit": limited.limit}
    plan = ar.build_plan(item, config)
    found = ar.simulate(item, plan)
    auto = {
        "seconds": found.step_seconds,
        "predicted": found.peak_bytes,
        "peak": measured_peak(item, plan, feeds),
        "notes": plan.notes,
    }
    for other, one in sorted(simulated(normalise(item), by_hand(limited)), key=lambda pair: pair[1].step_seconds):
        if one.peak_bytes <= 1.1 * limited.limit and measured_peak(item, other, feeds) <= limited.limit:
            words = {key: value for key, value in other.items() if key != "devices"}
            return {"auto": auto, "hand": {"seconds": one.step_seconds, "config": str(words)}}
    return {"auto": auto, "hand": {"seconds": float("inf"), "config": "nothing fits"}}


def by_hand(limited: Limited) -> Iterator[dict[str, Any]]:
    """Yield what a person may write with the name of one builder."""
    devices = _devices(limited)
    for extra in HANDS:
        for builder in BUILDERS:
            for variables in ("shared", "mirrored"):
                yield {"devices": devices, "strategy": {"name": builder, "variables": variables}, **extra}
        count = extra.get("microbatches", 1)
        for stages in (2, 4)[: limited.devices // 2]:
            section = {"stages": stages, "microbatches": count}
            others = {key: value for key, value in extra.items() if key != "microbatches"}
            yield {"devices": devices, "strategy": {"name": "Pipeline"}, "pipeline": section, **others}


def simulated(item: Any, configs: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield configurations that can be simulated, with what comes of them.

    Args:
        item: normalised.
        configs: to try.
    """
    from autograph_rewrite.config.config import Config
    from autograph_rewrite.cost.search import Evaluator
    from autograph_rewrite.errors import RewriteError
    from autograph_rewrite.strategies import named_builder

    evaluator = Evaluator(item)
    for config in configs:
        try:
            read = Config.of(config)
            yield config, evaluator.simulate(named_builder(read).build(item, read))
        except RewriteError:
            continue


def measured_peak(item: Any, given: Any, feeds: Mapping[str, Any]) -> float:
    """Return the most bytes that any device holds in a step: variables, what is fed, and what is made.

    Args:
        item: as a user made it.
        given: a configuration or a plan.
        feeds: one batch.
    """
    import autograph_rewrite as ar
    from autograph_rewrite.ir.types.device_names import short

    new = ar.rewrite(item, given)
    held: dict[str, float] = {short(device): 0.0 for device in (*new.report.plan.devices, "/device:CPU:0")}
    for node in new.graph:
        if node.op == "VarHandleOp":
            device = short(node.device) if node.device else "CPU:0"
            held[device] = held.get(device, 0.0) + handle_bytes(node)
    if new.report.plan.pipeline is not None:
        held |= {short(one): held.get(short(one), 0.0) for one in new.report.plan.pipeline.devices}
    held["CPU:0"] += sum(value.nbytes for value in feeds.values())
    made = dict.fromkeys(held, 0.0)
    for stats in traced(new, Built(item), feeds, PEAKS):
        made = {device: max(made[device], allocated(stats, new, device)) for device in held}
    return max(held[device] + made[device] for device in held)


def _devices(limited: Limited) -> list[str]:
    return [f"CPU:{number}" for number in range(limited.devices)]
