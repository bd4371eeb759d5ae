"""Note each configured setting that nothing reads, with its line and the reason.

    strategy: {variables: shared, hint: nccl}      in one process there is no collective that could follow the hint
    variables: [{match: w, sync: false}]           one process has nobody that it could run ahead of

`READERS` has an entry for every key of a configuration. Settings at their defaults are skipped. The resolved plan tells
whether a setting is read, whatever decided that: the mode, the strategy, an override or the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Override
from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.diagnostics.limits import matches
from autograph_rewrite.diagnostics.located_yaml import KeyPath, dotted
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors, grouped
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ops.rules import random
from autograph_rewrite.passes.base.report import Report
from autograph_rewrite.passes.pipeline_parallel import settings as pipeline_settings
from autograph_rewrite.plan.codecs import codec_of
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan, VariableRequest
from autograph_rewrite.plan.parts.notes import kept_whole
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import override_of
from autograph_rewrite.training_graph import TrainingGraph

# One configured setting: which variables, edges and nodes of the resolved plan it applies to.


@dataclass(frozen=True)
class Setting:
    """A key that the configuration sets to another value than its default.

    Attributes:
        plan: resolved from the configuration.
        item: normalised; only its ops are read.
        path: of the key.
        value: of the key.
        overrides: the override that applies to each variable of the plan, if any.
        report: of the rewrite; None if there is only a plan.
    """

    config: Config
    plan: Plan
    item: TrainingGraph
    path: KeyPath
    value: Any
    overrides: Mapping[str, Override | None]
    report: Report | None = None

    @property
    def key(self) -> str:
        """The path without the places in lists: `variables.hint`."""
        return ".".join(part for part in self.path if isinstance(part, str))

    @cached_property
    def owners(self) -> frozenset[str]:
        """The owners of edges to which the setting applies: variables; outside of `variables`, the step, too."""
        section = self.path[0]
        if section != "variables":
            key = str(self.path[-1])
            own = {name for name, one in self.overrides.items() if one is None or getattr(one, key, None) is None}
            return frozenset({*own, STEP})
        override = self.config.variables[int(self.path[1])]
        return frozenset(name for name, one in self.overrides.items() if one is override)

    @cached_property
    def step(self) -> Collection[Node]:
        """The nodes that a training step runs."""
        nodes = self.item.graph.nodes
        return ancestors(nodes[name] for name in self.item.targets if name in nodes)

    @cached_property
    def requests(self) -> tuple[VariableRequest, ...]:
        """The requests of the variables to which the setting applies."""
        return tuple(request for request in self.plan.variables if request.name in self.owners)

    @cached_property
    def edges(self) -> tuple[EdgePlan, ...]:
        """The edges to which the setting applies."""
        return tuple(edge for edge in self.plan.edges if not self.owners.isdisjoint(_with_wholes(edge.owner)))

    @property
    def is_shadowed(self) -> bool:
        """Whether it belongs to an override that applies to no variable."""
        return self.path[0] == "variables" and len(self.path) > 2 and not self.owners


def _with_wholes(owner: str) -> Iterator[str]:
    """Yield an owner; if it is a shard, also the variable or shard that it is a part of, outwards."""
    while owner:
        yield owner
        owner = owner.rpartition("/part_")[0]


SHOWN = 5
PLACING = frozenset(
    (
        "PS", "PSLoadBalancing", "PartitionedPS", "UnevenPartitionedPS", "PartitionedAR", "RandomAxisPartitionAR",
        "Parallax", "FSDP",
    )
)  # fmt: skip
"""Builders whose purpose is to place or split variables."""

Reader = Callable[[Setting], str]
"""Returns why nothing reads a setting, or an empty text if something does."""


def read(setting: Setting) -> str:
    """Accept a setting that is read or checked whatever the plan is."""
    return ""


def _policy(setting: Setting) -> str:
    """Say that a policy changes nothing, if all replicas compute the same updates of its variables."""
    report = setting.report
    names = {one.variable for one in setting.plan.policies if matches(setting.value, one.variable)}
    if report is None or not names or any(note.node in names for note in report.inexact):
        return ""
    return "what updates these variables is alike on all replicas, so they are exact"


def _needs_a_job(setting: Setting) -> str:
    return "there is one process" if len(setting.plan.processes) == 1 and not setting.plan.is_driven else ""


def _workers(setting: Setting) -> str:
    alone = setting.config.workers == 1 and not (setting.config.cluster is not None and setting.config.cluster.ps)
    return "one worker alone joins nobody, so its address is not used" if alone else ""


def _servers(setting: Setting) -> str:
    used = {device for device in setting.plan.homes.values() if parse(device).job == "ps"}
    return "" if used else f"{setting.plan.strategy} puts no variable on a parameter server"


def _model_axis(setting: Setting) -> str:
    model = setting.plan.model
    if model is None or any(one.split or one.device >= 0 for one in model.shardings):
        return ""
    return "nothing is placed on it (sharding), so each replica uses its first device only"


def _sharding(setting: Setting) -> str:
    return "" if setting.plan.model is not None else "there is no model axis (mesh.model)"


def _network(setting: Setting) -> str:
    return "there is one process, so nothing crosses the network" if _workers(setting) else ""


def _name(setting: Setting) -> str:
    plan = setting.plan
    places = plan.homes or any(request.sizes for request in plan.variables) or plan.pipeline is not None
    if places or setting.value not in PLACING:
        return ""
    return _whole(setting) or "it finds no variable to place or split, so the plan is that of AllReduce"


def _mode(setting: Setting) -> str:
    plan = setting.plan
    return "there is one replica" if plan.replicas == 1 and plan.model is None and setting.value == "mirrored" else ""


def _hint(setting: Setting) -> str:
    collectives = [edge for edge in setting.edges if edge.is_collective]
    if not collectives:
        return _no_collective(setting)
    if setting.value == "nccl" and all(parse(device).kind == "CPU" for device in setting.plan.devices):
        return "NCCL is for GPUs, and the replicas run on CPUs"
    return ""


def _buckets(setting: Setting) -> str:
    summed = any(edge.owner != STEP and _is_summed(edge) for edge in setting.edges)
    return "" if summed else _no_collective(setting)


def _is_summed(edge: EdgePlan) -> bool:
    adds = edge.compressor == NONE or codec_of(edge.compressor).elementwise
    return edge.is_collective and edge.from_ == "partial(sum)" and adds


def _no_collective(setting: Setting) -> str:
    plan = setting.plan
    if plan.replicas == 1:
        return "there is one replica, so nothing is exchanged"
    if plan.mode == "shared":
        return "shared variables are updated from plain sums; collectives come with strategy.variables: mirrored"
    return "no gradient that it is for is reduced by a collective"


def _compressor(setting: Setting) -> str:
    if setting.config.strategy.name == "Auto" and setting.path[0] == "strategy":
        return ""  # Auto may choose it, but need not
    if any(edge.compressor != "none" for edge in setting.edges):
        return ""
    if setting.plan.replicas == 1:
        return "there is one replica, so nothing is sent"
    return "no gradient that it is for is sent in a way that it could make smaller"


def _match(setting: Setting) -> str:
    if not setting.owners:
        return "an earlier entry matches every trained variable that it matches, or none of them is trained"
    override = setting.config.variables[int(setting.path[1])]
    return "" if len(override.model_fields_set) > 1 else "the entry says nothing but which variables it is for"


def _synchronizer(setting: Setting) -> str:
    return "" if setting.requests else "none of the variables that it is for is trained"


def _partition(setting: Setting) -> str:
    if any(request.sizes for request in setting.requests):
        return ""
    return _one_replica(setting) or _whole(setting) or "the variables are too small to be split"


def _whole(setting: Setting) -> str:
    """Say which variables cannot be split, their bytes, and why; empty if there are none."""
    variables = setting.item.variables
    whole = kept_whole(setting.plan.notes).items()
    by_reason = grouped((why, name) for name, why in whole if name in setting.owners and name in variables)
    said = []
    for why, (first, *others) in by_reason.items():
        held = sum(variables[name].nbytes for name in (first, *others))
        more = f" and {len(others)} more" if others else ""
        said.append(f"{held:,} bytes ('{first}'{more}) stay whole, and what the optimizer keeps for them: {why}")
    return "; ".join(said)


def _server_setting(setting: Setting) -> str:
    reason = "there is one process, and each update takes what all of its replicas have made of the step"
    return "" if len(setting.plan.processes) > 1 else reason


def _proxy(setting: Setting) -> str:
    reason = "the one process has the variable itself, so that a copy of it saves no way"
    return "" if len(setting.plan.processes) > 1 else reason


def _random(setting: Setting) -> str:
    if not any(node.op in random.RULES for node in setting.step):
        return "the step draws no random numbers"
    return "there is one replica" if setting.plan.instances == 1 else ""


def _batch_norm(setting: Setting) -> str:
    if setting.value != "local":
        return ""
    if setting.plan.instances == 1:
        return "there is one replica"
    if setting.report is None or setting.report.inexact:
        return ""
    return "nothing in this graph is a batch normalisation to which that applies"


def _one_replica(setting: Setting) -> str:
    return "there is one replica" if setting.plan.replicas == 1 else ""


def _timeout(setting: Setting) -> str:
    plan = setting.plan
    waits = plan.mode == "mirrored" and len(plan.part_devices or plan.devices) > 1
    if waits or plan.workers > 1 or (plan.homes and setting.config.cluster is not None):
        return ""
    return "there is one process, whose replicas share their variables: nothing waits for another"


def _memory_limit(setting: Setting) -> str:
    return "" if setting.config.strategy.name == "Auto" else "only the strategy Auto chooses by it"


_ALWAYS_READ = {
    "": "devices cluster strategy variables pipeline accumulation remat variable_policies passes ops mesh semantics "
    "device_assignment steps_per_run snapshot_steps",
    "cluster": "network",
    "variables.partition": "axis shards over stage",
    "pipeline": "microbatches microbatch_size circular_repeat boundaries names devices",
    "remat": "policy names scopes stages offload",
    "variable_policies": "synchronization aggregation",
    "local_sgd": "period warmup_steps average_slots",
    "passes": "file after",
    "ops": "file",
    "mesh": "data stage",
    "device_assignment": "topology computation_shape stride num_replicas core_assignment",
    "sharding": "match split axes replicate device assign strict optional",
    "semantics": "strict min_coverage",
}
"""By section, the settings that have an effect or are checked wherever they stand; a job may be elastic anywhere."""

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        **{f"{section}.{key}".lstrip("."): read for section, keys in _ALWAYS_READ.items() for key in keys.split()},
        "cluster.workers": _workers,
        "cluster.ps": _servers,
        "cluster.network.bandwidth_gbps": _network,
        "cluster.network.latency_us": _network,
        "strategy.name": _name,
        "strategy.variables": _mode,
        "strategy.bucket_bytes": _buckets,
        "strategy.compressor": _compressor,
        "strategy.hint": _hint,
        "variables.match": _match,
        "variables.synchronizer": _synchronizer,
        "variables.partition": _partition,
        "variables.sync": _server_setting,
        "variables.staleness": _server_setting,
        "variables.proxy": _proxy,
        "variables.bucket_bytes": _buckets,
        "variables.compressor": _compressor,
        "variables.hint": _hint,
        **pipeline_settings.READERS,
        "variable_policies.match": _policy,
        "local_sgd": _one_replica,
        "memory_limit": _memory_limit,
        "mesh.model": _model_axis,
        "sharding": _sharding,
        "semantics.batch_norm": _batch_norm,
        "semantics.random": _random,
        "input": _needs_a_job,
        "padding": _needs_a_job,
        "timeout_seconds": _timeout,
    }
)


_SPLITTING = ("strategy.name", "variables.partition")


def written(section: BaseModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the keys that a configuration sets to other values than their defaults, sections before their keys."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value, here = getattr(section, name), (*path, name)
        if value == type(section).model_fields[name].get_default(call_default_factory=True):
            continue
        yield here, value
        if isinstance(value, BaseModel):
            yield from written(value, here)
        for i, part in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(part, BaseModel):
                yield from written(part, (*here, i))


def unused_settings(config: Config, plan: Plan, item: TrainingGraph, report: Report | None = None) -> list[str]:
    """Return notes on the settings that nothing reads, and on those that split only some of their variables.

    Args:
        config: the configuration.
        plan: resolved from it for a training step.
        item: normalised; only its ops are read.
        report: of the rewrite; None if there is only a plan.
    """
    notes = []
    overrides = {request.name: override_of(request.name, config) for request in plan.variables}
    for path, value in written(config):
        setting = Setting(config, plan, item, path, value, overrides, report)
        if setting.is_shadowed and path[2:] != ("match",):
            continue
        effect, reason = "does nothing here", READERS[setting.key](setting)
        if not reason and setting.key in _SPLITTING:
            effect, reason = "splits the other variables only", _whole(setting)
        if reason:
            notes.append(f"{config.where(*path)}: {dotted(path)}{_shown(value)} {effect}: {reason}")
    return notes


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel | tuple):
        return ""
    return f": {str(value).lower() if isinstance(value, bool) else value}"


def with_unused_settings(item: TrainingGraph, config: Config, original: TrainingGraph) -> TrainingGraph:
    """Add notes on unused settings to the plan of a rewritten training step, with one warning for all of them."""
    plan = noted(item.report.plan, config, original, item.report)
    return replace(item, report=replace(item.report, plan=plan)) if plan is not item.report.plan else item


def noted(plan: Plan, config: Config, item: TrainingGraph, report: Report | None = None) -> Plan:
    """Return the resolved plan of a training step with a note on each unused setting, with one warning for all.

    Args:
        item: the original.
        report: of the rewrite; None if there is only a plan.

    Raises:
        PlanError: variables stay whole that a setting should split, and `semantics.strict` is set.
    """
    notes = [note for note in unused_settings(config, plan, item, report) if note not in plan.notes]
    if not notes:
        return plan
    # `_whole` writes the names of variables in this form.
    unsplit = [note for note in notes if any(f"('{name}'" in note for name in kept_whole(plan.notes))]
    if config.semantics.strict and unsplit:
        raise PlanError(
            "\n  ".join(unsplit),
            hint="set semantics.strict to false to train with whole variables, or choose a strategy that fits",
        )
    more = f"\n  ... and {len(notes) - SHOWN} more" if len(notes) > SHOWN else ""
    listed = "".join(f"\n  {note}" for note in notes[:SHOWN])
    warn_user(f"settings without an effect:{listed}{more}")
    return replace(plan, notes=(*plan.notes, *notes))
