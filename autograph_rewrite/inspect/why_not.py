"""Why a variable is not sharded, not on servers or not cut under a strategy; or what would be different.

Nothing here knows a limit: the strategy's builder is asked for its choice and its reason, the configuration's checks
and the passes for their errors, and the resolved plan for what would be exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.analysis.variables.uses import roles
from autograph_rewrite.compile import resolve_plan, with_processes
from autograph_rewrite.config import presets
from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.step.analyzed_step import cut_model
from autograph_rewrite.diagnostics.amounts import few, several, size
from autograph_rewrite.errors import ConfigError, GraphError, RewriteError
from autograph_rewrite.inspect.report_view import ShownEdge, edges_of
from autograph_rewrite.inspect.summary import VariableLine, summarise
from autograph_rewrite.inspect.values import conversion
from autograph_rewrite.ir.attr_inference import closest
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.parts.residence import Residence
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import request
from autograph_rewrite.strategies import STRATEGIES, named_builder
from autograph_rewrite.strategies.candidates import with_settings
from autograph_rewrite.strategies.per_variable import PerVariable
from autograph_rewrite.training_graph import TrainingGraph

MODEL = "model"
"""The word for the model axis, beside the names of strategies."""
DEVICES = {"devices": ["CPU:0", "CPU:1"]}
STAGES = {1: "of its slots", 2: "of its slots and gradient", 3: "of it, its slots and gradient"}


@dataclass(frozen=True)
class VariablePlace:
    """What a strategy makes of one variable.

    Attributes:
        variable: its name, type and size, for people.
        strategy: that was asked about.
        lives: where it would live; empty where the strategy cannot be followed.
        because: why it is not spread further; empty where it is.
        exchanged: what would be exchanged for it in a step.
    """

    variable: str
    strategy: str
    lives: str
    because: str = ""
    exchanged: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.variable} under {self.strategy}:"]
        lines += [f"  {self.lives}"] if self.lives else []
        joined = bool(self.lives) and not self.because.startswith("not ")
        lines += [f"  {'not further, because ' * joined}{self.because}"] if self.because else []
        lines += [f"  in a step {one}" for one in self.exchanged]
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "variable": self.variable,
            "strategy": self.strategy,
            "lives": self.lives or None,
            "because": self.because or None,
            "exchanged": list(self.exchanged),
        }


def why_not(
    item: TrainingGraph, variable: str, strategy: str, config: Config | None = None, *, batch: int | None = None
) -> VariablePlace:
    """Return what a strategy makes of a variable, and why it makes no more of it.

    Args:
        item: the original graph.
        variable: by name.
        strategy: a strategy's name, "model" for the model axis, or the name or path of a configuration.
        config: the devices and everything else; left out, those of the strategy's configuration, else two devices.
        batch: examples of all devices together, where the graph leaves that open.

    Raises:
        GraphError: there is no such variable, or the graph is distributed already.
        ConfigError: there is no such strategy.
    """
    flat = normalise_original(item)
    lines = {line.name: line for line in summarise(flat).variables}
    if variable not in lines:
        hint = closest(variable, lines) or "`autograph-rewrite inspect GRAPH` lists them"
        raise GraphError(f"the graph has no variable '{variable}'", hint=hint)
    line = lines[variable]
    chosen = _config(strategy, config)
    about = _about(line, lines)
    if line.slot_of is not None:
        because = f"it is a slot of '{line.slot_of}' and lives where that does: ask for '{line.slot_of}'"
        return VariablePlace(about, strategy, "", because)
    if strategy == MODEL:
        return VariablePlace(about, "the model axis", *_on_model_axis(flat, line, chosen))
    if not roles(flat)[variable].trained:
        return VariablePlace(
            about, strategy, "", "no gradient updates it in a step, and strategies place what is trained"
        )
    return _under(flat, line, about, chosen, batch)


def _config(strategy: str, config: Config | None) -> Config:
    if strategy == MODEL or strategy in STRATEGIES:
        base = with_processes(config or Config.of(DEVICES))
        return base if strategy == MODEL else _named(base, strategy)
    if presets.found(strategy) == strategy and "/" not in strategy and not strategy.endswith((".yaml", ".json")):
        names = (*STRATEGIES, MODEL, *presets.names())
        raise ConfigError(f"'{strategy}' is no strategy or configuration", hint=closest(strategy, names))
    chosen = with_processes(Config.load(strategy))
    if config is None:
        return chosen
    return with_settings(chosen, devices=config.devices, cluster=config.cluster)


def _named(config: Config, strategy: str) -> Config:
    return with_settings(config, strategy=config.strategy.model_copy(update={"name": strategy}))


def _about(line: VariableLine, lines: dict[str, VariableLine]) -> str:
    slots = sum(lines[slot].bytes or 0 for slot in line.slots if slot in lines)
    beside = f" and {size(slots)} in {several(len(line.slots), 'slot')}" if line.slots else ""
    return f"'{line.name}' ({line.dtype}{shape_text(line.shape)}, {size(line.bytes or 0)}{beside})"


def _under(flat: TrainingGraph, line: VariableLine, about: str, config: Config, batch: int | None) -> VariablePlace:
    strategy, name = config.strategy.name, line.name
    try:
        builder = named_builder(config)
        plan = builder.build(flat, config)
        choice = builder.choices(flat, config)[name] if isinstance(builder, PerVariable) else None
        resolved = resolve_plan(flat, config, batch)
    except RewriteError as error:
        return VariablePlace(about, strategy, "", f"it cannot be followed: {error.problem}")
    residence = plan.residences.get(name)
    edges = [edge for edge in edges_of(flat, resolved) if edge.owner == name or edge.owner.startswith(f"{name}/part_")]
    split = residence is not None and bool(residence.sizes)
    because = choice.because if choice is not None and not split else ""
    return VariablePlace(about, strategy, _lives(residence, plan), because, tuple(_exchanged(edges)))


def _lives(residence: Residence | None, plan: Plan) -> str:
    """Return where a variable lives, in words."""
    if residence is None or residence.placement == "replicated":
        return "whole, a copy on each replica" if plan.mode == "mirrored" else "whole, one copy for each process"
    places = few([device_specs.short(device) for device in dict.fromkeys(residence.servers or plan.devices)])
    if not residence.sizes:
        return f"whole, on {places}, with its slots and its update"
    shards = f"{several(len(residence.sizes), 'shard')} of {few([str(one) for one in residence.sizes])}"
    whose = f", the shards {STAGES[residence.stage]}" if residence.stage else ", with their slots and updates"
    return f"{residence.placement} in {shards}, on {places}{whose}"


def _exchanged(edges: list[ShownEdge]) -> Iterator[str]:
    for edge in edges[:4]:
        yield f"%{edge.value} {conversion(edge)}"
    if len(edges) > 4:
        yield f"{len(edges) - 4} more exchanges"


def _on_model_axis(flat: TrainingGraph, line: VariableLine, config: Config) -> tuple[str, str]:
    """Return along which dimensions a variable can be cut in two on the model axis, and why not along the others."""
    can, cannot = [], []
    for dim in range(len(line.shape or ())):
        split = [2 if one == dim else 1 for one in range(len(line.shape or ()))]
        try:
            found, edges = cut_model(flat, request(flat, _cut(line.name, split, config), strategy="AllReduce"))
        except RewriteError as error:
            cannot.append(f"not along dimension {dim}: {error.problem}")
            continue
        if line.name not in found:
            cannot.append(f"not along dimension {dim}: its readers and its update want it whole")
            continue
        exchanged = [edge for edge in edges if edge.lowered.hops]
        nbytes = f", {size(sum(edge.bytes for edge in exchanged))} of known shapes" if exchanged else ""
        can.append(f"along dimension {dim}: its devices exchange {several(len(exchanged), 'value')} in a step{nbytes}")
    lives = f"can be cut in two {'; or '.join(can)}" if can else ""
    if not line.shape:
        cannot.append("it is a scalar" if line.shape == () else "its shape is not known")
    return lives, "; ".join(cannot)


def _cut(name: str, split: list[int], config: Config) -> Config:
    """Return a configuration with two logical devices for each replica, which share one variable."""
    devices = list(config.devices or DEVICES["devices"])
    devices = devices if len(devices) % 2 == 0 else [*devices, *devices]
    entry = {"match": _literal(name), "split": split}
    return Config.of({"devices": devices, "mesh": {"model": 2}, "sharding": [entry]})


def _literal(name: str) -> str:
    return "".join(one if one.isalnum() or one in "_/" else f"\\{one}" for one in name)
