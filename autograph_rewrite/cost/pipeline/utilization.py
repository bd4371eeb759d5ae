"""Results of a pipelined step: its bubble, and the peak memory of each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from autograph_rewrite.analysis.liveness import Holders, first_holders
from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.pipeline.liveness import footprint
from autograph_rewrite.cost.pipeline.parts import Staged, stage
from autograph_rewrite.cost.pipeline.tasks import Alive, StagedStep, lives_of, schedule_of
from autograph_rewrite.cost.tasks.result import DeviceUse, ExchangeUse
from autograph_rewrite.cost.tasks.step import AnalyzedStep, OpCounts, count
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.device_names import short
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.plan.parts import pipeline_schedule
from autograph_rewrite.plan.parts.messages import STEP
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD
from autograph_rewrite.plan.plan import Plan


class PipelineUse(NamedTuple):
    """How a pipelined step uses its devices.

    Attributes:
        step: its tasks, played.
        seconds: that they take.
        bubble: the share of the time, from the first forward to the last backward part, in which devices wait.
        devices: with their memory.
        exchanges: what crosses between devices.
        lanes: where it computes.
    """

    step: StagedStep
    seconds: float
    bubble: float
    devices: tuple[DeviceUse, ...]
    exchanges: tuple[ExchangeUse, ...]
    lanes: frozenset[str]


def use_of_pipeline(
    folded: AnalyzedStep, plan: Plan, topology: Topology, sizes: Sizes, counts: Mapping[Node, OpCounts] | None = None
) -> PipelineUse:
    """Play one step of a pipeline.

    Raises:
        PlanError: the stages, or their schedule, are impossible.
    """
    assert plan.pipeline is not None
    staged = stage(folded, plan, counts or count(folded, sizes, topology.cpu))
    held = footprint(staged, sizes, interleaved=plan.interleaved)
    step = StagedStep(staged, held, plan.pipeline, plan.microbatches, topology)
    seconds = step.run()
    lanes = frozenset(lane for task in step.tasks.values() for lane in task.holds)
    devices = tuple(_devices(step)) if topology.logical == 1 else _on_logical_devices(staged, plan, topology, sizes)
    return PipelineUse(step, seconds, _bubble(step), devices, tuple(_exchanges(step)), lanes)


def _on_logical_devices(staged: Staged, plan: Plan, topology: Topology, sizes: Sizes) -> tuple[DeviceUse, ...]:
    """Return the logical devices of all stages: the step is played again for the memory of each."""
    assert plan.pipeline is not None
    found: list[tuple[int, DeviceUse]] = []
    for device in range(topology.logical):
        own = replace(staged, logical=device)
        held = footprint(own, sizes, interleaved=plan.interleaved)
        step = StagedStep(own, held, plan.pipeline, plan.microbatches, topology)
        step.run()
        firsts = {short(name): at for at, name in enumerate(plan.pipeline.devices)}
        for use in _devices(step):
            number = firsts[use.name] * topology.logical + device
            found.append((number, replace(use, name=short(topology.logical_name(number)))))
    return tuple(use for _, use in sorted(found, key=lambda pair: pair[0]))


def _bubble(step: StagedStep) -> float:
    parts = [task for (kind, *_), task in step.tasks.items() if kind in (FORWARD, BACKWARD)]
    span = max(task.end for task in parts) - min(task.start for task in parts)
    devices = sum(map(len, step.devices))
    return 1 - sum(task.seconds for task in parts) / (span * devices) if span else 0.0


def _devices(step: StagedStep) -> Iterator[DeviceUse]:
    """Yield each device of each replica."""
    orders = pipeline_schedule.orders(*schedule_of(step.pipeline, step.staged, step.micro))
    variables = _variables(step)
    for replica, names in enumerate(step.devices):
        for device in dict.fromkeys(step.staged.devices):
            name = names[device]
            alive = [one for one in step.alive if one.device == name]
            kept = variables.get(device, 0) if not replica else 0
            fed = step.footprint.fed.get(device, 0)
            slots = [slot for slot, number in enumerate(step.staged.devices) if number == device]
            lives = lives_of(alive, kept + fed)
            forward = [one for one in alive if one.held and one.held.activation_of is not None]
            own = [task for key, task in step.tasks.items() if key[3] == replica and step.runs_on(key) == device]
            yield DeviceUse(
                short(name),
                1,
                sum(task.seconds for task in own),
                lives.peak,
                kept,
                activation_bytes=lives_of(forward).peak,
                gradient_bytes=step.footprint.sums(device),
                memory=lives.over_time(),
                holders=_at_peak(alive, lives.top, kept, fed),
                in_flight=sum(pipeline_schedule.in_flight(orders[slot]) for slot in slots),
            )


def _at_peak(alive: list[Alive], top: float, kept: int, fed: int) -> Holders:
    """Return who holds the most when most bytes are alive: parts of micro-batches, by what they made."""
    held = Counter({"variables": kept, "inputs, constants and outputs": fed})
    for one in alive:
        if one.maker.start <= top < one.end:
            held[one.maker.name] += one.nbytes
    return first_holders(held)


def _variables(step: StagedStep) -> dict[int, int]:
    """Return the bytes of variables by device."""
    folded, found = step.staged.folded, dict[int, int]()
    for variable in folded.item.variables.values():
        handle = folded.state.graph.nodes.get(variable.handle)
        if handle is not None and not step.staged.counts_here(handle):
            continue
        part = step.staged.part_of.get(handle) if handle is not None else None
        device = step.staged.device(part) if part is not None else 0
        found[device] = found.get(device, 0) + variable.nbytes
    return found


def _exchanges(step: StagedStep) -> Iterator[ExchangeUse]:
    """Yield what crosses from a part to a device in a step."""
    names = step.devices[0]
    for ((kind, number), device), nbytes in sorted(step.footprint.crossing.items()):
        times = step.micro if kind in (FORWARD, BACKWARD) else 1
        value = f"{kind}@{number} to {short(names[device])}"
        yield ExchangeUse(value, "send", (STEP,), nbytes * times)
