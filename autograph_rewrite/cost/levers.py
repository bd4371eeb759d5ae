"""The levers of a step, in words: what computing, exchanging and memory take, where, and what would change it.

What another plan would take is simulated, not guessed; a plan that this graph cannot follow is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.diagnostics.amounts import duration, percent, several, size
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.plan.parts.messages import STEP, Remat
from autograph_rewrite.plan.plan import Plan

WORTH = 0.97
"""Another plan is offered where it takes less than this part."""
MUCH = 0.05
"""Of a step: a smaller part is not worth another simulation."""
ALIKE = 0.95
Other = Callable[[], Plan]
"""Makes another plan of the same graph."""


def levers(
    found: Simulation, plan: Plan, simulated: Callable[[Plan], Simulation], others: Mapping[str, Other]
) -> tuple[str, ...]:
    """Return at most three sentences, that of the largest part of the step first and that of memory last.

    Args:
        found: the step, with its nodes.
        plan: of the step.
        simulated: predicts a step of another plan.
        others: plans of other strategies by their name, where those can be made.
    """
    request = replace(plan, edges=(), model_edges=())
    plain = plan.pipeline is None and plan.model is None
    sending = {"the compressor bf16": lambda: replace(request, default=replace(plan.default, compressor="bf16"))}
    keeping = {"rematerialisation (policy sqrt)": lambda: replace(request, remat=Remat("sqrt"))}

    def tried(offered: Mapping[str, Other]) -> Iterator[tuple[str, Simulation]]:
        for name, other in offered.items() if plain else ():
            try:
                yield name, simulated(other())
            except RewriteError:
                continue

    exchanging = found.exposed_seconds / found.step_seconds if found.step_seconds else 0.0
    parts = {"compute": 1 - exchanging, "exchange": exchanging}
    said = [_compute(found)]
    if found.exchanged_bytes:
        offered = {**{name: others[name] for name in ("Parallax",) if name in others}, **sending}
        faster = tried(offered if exchanging > MUCH and plan.default.compressor == "none" else {})
        said.append(_exchange(found, exchanging, faster))
    if parts["exchange"] > parts["compute"]:
        said.reverse()
    held = max(found.devices, key=lambda one: one.peak_bytes)
    smaller = dict(keeping) if plan.remat is None and held.activation_bytes > held.peak_bytes / 4 else {}
    if held.variable_bytes > held.peak_bytes / 4 and "FSDP" in others:
        smaller["FSDP"] = others["FSDP"]
    return (*said, _memory(found, tried(smaller)))


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


def _exchange(found: Simulation, share: float, faster: Iterator[tuple[str, Simulation]]) -> str:
    handed = size(found.exchanged_bytes)
    text = f"Exchange: {percent(share)} of the step only communicates; each member hands over {handed}"
    owners = [(one.bytes, one.owners) for one in found.exchanges if one.owners != (STEP,)]
    if owners:
        most, names = max(owners)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text += f", {percent(most / max(1, found.moved_bytes))} of it for {names[0]}{more}"
    best = min(faster, key=lambda pair: pair[1].step_seconds, default=None)
    if best is None or best[1].step_seconds > WORTH * found.step_seconds:
        return text + "."
    name, other = best
    return (
        f"{text}. With {name} it would hand over {size(other.exchanged_bytes)}, and a step would take "
        f"{duration(other.step_seconds)} instead of {duration(found.step_seconds)}."
    )


def _memory(found: Simulation, smaller: Iterator[tuple[str, Simulation]]) -> str:
    held = max(found.devices, key=lambda one: one.peak_bytes)
    variables, kept = (percent(n / max(1, held.peak_bytes)) for n in (held.variable_bytes, held.activation_bytes))
    text = (
        f"Memory: {held.name} needs {size(held.peak_bytes)} at its peak, {variables} for variables and slots, "
        f"{kept} for activations that gradients need"
    )
    best = min(smaller, key=lambda pair: pair[1].peak_bytes, default=None)
    if best is None or best[1].peak_bytes > WORTH * found.peak_bytes:
        return text + "."
    name, other = best
    took = duration(other.step_seconds)
    return f"{text}. With {name} it would need {size(other.peak_bytes)}, and a step would take {took}."
