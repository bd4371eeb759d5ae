"""Explain in sentences where a step spends time and memory, and which other plan would reduce it.

Other plans are simulated, not estimated; a plan that this graph cannot follow is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.search import Evaluator
from autograph_rewrite.cost.simulate import SimulatedStep
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.diagnostics.amounts import duration, percent, several, size
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.plan.parts.messages import STEP, Remat
from autograph_rewrite.plan.plan import Plan

WORTH = 0.97
"""Another plan is offered if it takes at most this part of the time or memory."""
MUCH = 0.05
"""A smaller part of the step than this is not worth another simulation."""
ALIKE = 0.95  # of the longest layer's time: other layers that take as much are reported together with it
Offered = Iterator[tuple[str, Simulation]]
"""Other plans, each with the name of its change, simulated lazily."""


def levers(step: SimulatedStep, config: Config | None) -> tuple[str, ...]:
    """Return at most three texts, that of the largest part of the step first and that of memory last.

    Args:
        step: with its nodes.
        config: the configuration of its plan; None: no other strategy is offered.
    """
    found, request = step.found, replace(step.plan, edges=(), model_edges=())
    exchanging = found.exposed_seconds / found.step_seconds if found.step_seconds else 0.0
    said = [_compute(found)]
    if found.exchanged_bytes:
        compressed = replace(request, default=replace(request.default, compressor="bf16"))
        faster = {"Parallax": _built("Parallax", step, config), "the compressor bf16": lambda: compressed}
        is_much = exchanging > MUCH and request.default.compressor == "none"
        said.append(_exchange(found, exchanging, _offered(faster if is_much else {}, step, request)))
    if exchanging > 0.5:
        said.reverse()
    held = max(found.devices, key=lambda one: one.peak_bytes)
    smaller: dict[str, Callable[[], Plan | None]] = {}
    if request.remat is None and held.activation_bytes > held.peak_bytes / 4:
        smaller["rematerialisation (policy sqrt)"] = lambda: replace(request, remat=Remat("sqrt"))
    if held.variable_bytes > held.peak_bytes / 4:
        sharded = {"FSDP": _built("FSDP", step, config)}
        smaller = {**sharded, **smaller} if held.variable_bytes > held.activation_bytes else {**smaller, **sharded}
    return (*said, _memory(found, _offered(smaller, step, request)))


def _built(strategy: str, step: SimulatedStep, config: Config | None) -> Callable[[], Plan | None]:
    """Return a function that builds the plan of another strategy; without a configuration, it returns None."""
    from autograph_rewrite.strategies import STRATEGIES

    return lambda: STRATEGIES[strategy].build(step.folded.item, config.with_devices(())) if config is not None else None


def _offered(plans: Mapping[str, Callable[[], Plan | None]], step: SimulatedStep, request: Plan) -> Offered:
    """Yield the plans that differ from the requested one and that the graph can follow."""
    if request.part_devices:
        return
    evaluator, own = Evaluator.after(step), (request.variables, request.default, request.remat)
    for name, make in plans.items():
        try:
            plan = make()
            if plan is not None and (plan.variables, plan.default, plan.remat) != own:
                yield name, evaluator.simulate(plan)
        except RewriteError:
            continue


def _compute(found: Simulation) -> str:
    first = max(found.devices, key=lambda one: one.busy_seconds)
    text = f"Compute: {first.name} is busy for {percent(first.busy_seconds / found.step_seconds)} of the step"
    layers = found.layers()
    if not layers or not layers[0].seconds:
        return text + "."
    top = max(layers, key=lambda one: one.seconds)
    alike = [one for one in layers if one.seconds >= ALIKE * top.seconds]
    share = percent(top.seconds / sum(one.seconds for one in found.nodes))
    whole = first.busy_seconds - min(one.busy_seconds for one in found.devices if one.flops or one is first)
    undivided = whole / found.step_seconds
    more = f"; {percent(undivided)} of the step does what is not divided" if undivided > MUCH else ""
    if len(alike) == 1:
        return f"{text}, {share} of that for {top.name}{more}."
    return f"{text}: {several(len(alike), 'layer')} like {top.name} take {share} of that each{more}."


def _exchange(found: Simulation, share: float, offered: Offered) -> str:
    handed = size(found.exchanged_bytes)
    text = f"Exchange: {percent(share)} of the step only communicates; each member hands over {handed}"
    owners = [(one.bytes, one.owners) for one in found.exchanges if one.owners != (STEP,)]
    if owners:
        most, names = max(owners)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text += f", {percent(most / max(1, found.moved_bytes))} of it for {names[0]}{more}"
    # The first plan that helps is offered, because each simulation takes long; lossless plans come first.
    faster = next((pair for pair in offered if pair[1].step_seconds <= WORTH * found.step_seconds), None)
    if faster is None:
        return text + "."
    name, other = faster
    return (
        f"{text}. With {name} it would hand over {size(other.exchanged_bytes)}, and a step would take "
        f"{duration(other.step_seconds)} instead of {duration(found.step_seconds)}."
    )


def _memory(found: Simulation, offered: Offered) -> str:
    held = max(found.devices, key=lambda one: one.peak_bytes)
    variables, kept = (percent(n / max(1, held.peak_bytes)) for n in (held.variable_bytes, held.activation_bytes))
    text = (
        f"Memory: {held.name} needs {size(held.peak_bytes)} at its peak, {variables} for variables and slots, "
        f"{kept} for activations that gradients need"
    )
    smaller = next((pair for pair in offered if pair[1].peak_bytes <= WORTH * found.peak_bytes), None)
    if smaller is None:
        return text + "."
    name, other = smaller
    took = duration(other.step_seconds)
    return f"{text}. With {name} it would need {size(other.peak_bytes)}, and a step would take {took}."
