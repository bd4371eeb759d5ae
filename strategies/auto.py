"""Auto: search the plan with the shortest simulated step, among the builders' plans and mixtures of them.

The network is the one that the configuration describes; machines are round figures (`cost.hardware.machine`), never
measured ones, since every process has to find the same plan. The plan's notes say what was compared and why it was
chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Network
from autograph_rewrite.diagnostics.amounts import duration
from autograph_rewrite.diagnostics.progress_line import progress_on
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES
from autograph_rewrite.plan.codecs import shown
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.residence import Sharded, residence_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import default_options, override_of
from autograph_rewrite.strategies.assemble import assemble, trained_variables
from autograph_rewrite.strategies.builder import Choice, Parts, StrategyBuilder, TrainedVariable
from autograph_rewrite.strategies.candidates import PLAIN, Compared, in_mode, plans_of, rows
from autograph_rewrite.strategies.memory_limit import Starts, room_of
from autograph_rewrite.strategies.mesh_search import MeshSearch, annotated, wants_annotations
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.cost.search import Candidate, Evaluator, Search

NODES = 240_000
"""So many nodes are simulated in all: fewer plans of larger graphs."""
FEWEST, MOST = 24, 120
"""Plans that are tried at least, and at most."""
AROUND = 12
"""The same with a memory limit, beside what fits: recomputation is chosen anew for each of them."""
BUCKETS = (256 * 1024, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True)
class Auto:
    """Searches builders, placements of single variables, buckets and, where allowed, compressors.

    Attributes:
        builders: the builders whose plans are compared and mixed, by name.
        every: also those whose plans cannot be carried out yet.
    """

    builders: Mapping[str, StrategyBuilder]
    every: bool = False

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """The request that makes a step shortest in simulation; its notes say why.

        Raises:
            ConfigError: as the builders do.
        """
        with progress_on(sys.stderr, lines=False):
            return self._build(item, config)

    def _build(self, item: TrainingGraph, config: Config) -> Plan:
        from autograph_rewrite.cost.hardware.machine import Machine
        from autograph_rewrite.cost.search import Evaluator, Search, first_possible
        from autograph_rewrite.cost.simulate import Hardware

        network = config.cluster.network if config.cluster is not None else None
        machine = Machine(onednn=False)  # counts more memory, and all workers choose alike, whatever their processors
        evaluator = Evaluator(item, Hardware(machine, network))
        room, faults, ranked = room_of(config), list[str](), list[Compared]()
        if room is not None or config.model_size > 1:
            evaluator.batch = EXAMPLES * len(config.devices or ()) * config.workers  # the same for all meshes
        if room is None and wants_annotations(item, config):
            config = self._annotated(item, config, network)
        if room is None:
            plans, dropped = plans_of(item, config, self.builders)
            compared = self._compared(evaluator, plans)
            tries = max(FEWEST, min(MOST, NODES // max(len(item.graph), 1)))
        else:
            starts = Starts(item, config, evaluator, self.builders, room)
            fits = starts.fitting()
            config, faults, ranked = fits[0].config, starts.faults, starts.ranked()
            plans, dropped = plans_of(item, config, self.builders)
            compared, tries = {start.name: start.candidate for start in fits}, AROUND
        best = min(compared, key=lambda name: compared[name].key)
        search = Search(evaluator, evaluator.tried + tries, compared[best], room)
        self._mix(item, config, search, list(plans.values()))
        self._bucket(config, search)
        self._compress(item, config, search)
        if self.every:
            return _named(search, compared, search.best, [*dropped, *faults], ranked)
        others = sorted(compared.values(), key=lambda candidate: candidate.key)
        found, impossible = first_possible(item, [*reversed(search.kept), *others])
        return _named(search, compared, found, [*dropped, *impossible, *faults], ranked)

    def _annotated(self, item: TrainingGraph, config: Config, network: Network | None) -> Config:
        """Return a configuration with what is best cut on its mesh, as if each device had cores of its own."""
        from autograph_rewrite.cost.hardware.machine import Machine
        from autograph_rewrite.cost.search import Evaluator
        from autograph_rewrite.cost.simulate import Hardware

        examples = EXAMPLES * len(config.devices or ()) * config.workers
        evaluator = Evaluator(item, Hardware(Machine(apart=True, onednn=False), network), batch=examples)
        build = self.builders[PLAIN].build
        search = MeshSearch(item, config, evaluator, lambda other: build(item, other))
        path = search.run()
        return annotated(config, item, path[-1].cuts) if path else config

    def _compared(self, evaluator: Evaluator, plans: Mapping[str, Plan]) -> dict[str, Candidate]:
        from autograph_rewrite.cost.search import Candidate

        return {name: Candidate(plan, evaluator.simulate(plan)) for name, plan in plans.items()}

    def _mix(self, item: TrainingGraph, config: Config, search: Search, plans: list[Plan]) -> None:
        """Give variables that are alike what another builder chose for them, the largest first."""
        trained = trained_variables(item, search.best.plan.graph_digest)
        choices = {name: _choices(name, plans) for name in trained}
        mode = search.best.plan.mode
        chosen = in_mode(config, mode)
        current = {request.name: _choice(request) for request in search.best.plan.variables}
        for alike in _alike(trained):
            first = alike[0]
            for other in choices[first.name]:
                if other == current.get(first.name):
                    continue
                wanted = {**current, **dict.fromkeys((one.name for one in alike), other)}
                make = partial(_assembled, item, chosen, wanted)
                if search.offer(make, f"{_shown(alike)} {_worded(other)}"):
                    current = wanted

    def _bucket(self, config: Config, search: Search) -> None:
        """Try other sizes of buckets, where the configuration does not say one."""
        if "bucket_bytes" in config.strategy.model_fields_set:
            return
        for size in BUCKETS:
            plan = search.best.plan
            if size != plan.default.bucket_bytes:
                free = _free(plan, config, "bucket_bytes")
                changed = replace(plan, default=replace(plan.default, bucket_bytes=size))
                make = partial(_with_options, changed, free, bucket_bytes=size)
                search.offer(make, f"buckets of {size:,} bytes")

    def _compress(self, item: TrainingGraph, config: Config, search: Search) -> None:
        """Try the compressor that the configuration allows, on variables that are alike, the largest first."""
        allowed = default_options(config).compressor
        if allowed == "none":
            return
        free = _free(search.best.plan, config, "compressor")
        for alike in _alike(trained_variables(item)):
            names = free & {one.name for one in alike}
            if names and not alike[0].role.sparse:
                make = partial(_with_options, search.best.plan, names, compressor=allowed)
                search.offer(make, f"{_shown(alike)} sent as {shown(allowed)}")


def _assembled(item: TrainingGraph, config: Config, choices: Mapping[str, Choice]) -> Plan:
    return assemble(item, config, lambda one: choices.get(one.name, Choice()), strategy="Auto")


def _named(
    search: Search, compared: Mapping[str, Candidate], found: Candidate, dropped: list[str], others: list[Compared]
) -> Plan:
    """Return what was found under Auto's name, with the reasons, and how it ranks among the others.

    Args:
        search: with what was kept.
        compared: the plans with which a search may begin.
        found: the plan that is taken.
        dropped: notes on plans that there are not.
        others: all plans that were simulated before, in their order; none: those that were compared.
    """
    ranked = sorted(compared, key=lambda name: compared[name].key)
    times = (f"{name} {duration(compared[name].found.step_seconds)}" for name in ranked)
    took = duration(found.found.step_seconds)
    reasons = search.reasons[: search.kept.index(found)] if found in search.kept else []
    first = search.kept[0] if found in search.kept else found
    began = next(name for name in ranked if compared[name] is first)
    others = others or [Compared(name, compared[name].found) for name in ranked]
    name = began
    if reasons:
        fits = next((one.fits for one in others if one.name == began), None)
        name = f"{began}, mixed: {'; '.join(reasons)}"
        others = [Compared(name, found.found, fits), *others]
    notes = (
        *dropped,
        *rows(others, name),
        f"Auto simulated {search.evaluator.tried} plans; a step of the best takes {took}",
        f"a step of single builders: {', '.join(times)}",
        f"it began with {began}; " + ("; ".join(reasons) or "no change made it better"),
    )
    plan = replace(found.plan, strategy="Auto", notes=(*found.plan.notes, *notes), id="")
    return replace(plan, id=f"Auto-{plan.digest()[:12]}")


def _choice(request: VariableRequest) -> Choice:
    found = residence_of(request)
    split = Parts(found.axis, len(found.sizes)) if isinstance(found, Sharded) else None
    return Choice(request.options.synchronizer, split, found.stage)


def _choices(name: str, plans: list[Plan]) -> list[Choice]:
    """Return the different choices that builders made for a variable."""
    requests = (request for plan in plans for request in plan.variables if request.name == name)
    return list(dict.fromkeys(_choice(request) for request in requests))


def _alike(trained: Mapping[str, TrainedVariable]) -> list[list[TrainedVariable]]:
    """Return the variables in groups of one shape and role, the heaviest group first."""
    groups: dict[object, list[TrainedVariable]] = {}
    for one in trained.values():
        groups.setdefault((one.role, one.shape, one.variable.dtype), []).append(one)
    return sorted(groups.values(), key=lambda group: -sum(one.variable.nbytes for one in group))


def _shown(alike: list[TrainedVariable]) -> str:
    more = f" and {len(alike) - 1} alike" if len(alike) > 1 else ""
    return f"'{alike[0].name}'{more}"


def _worded(choice: Choice) -> str:
    if choice.stage:
        return f"split over the replicas along axis {choice.parts.axis if choice.parts else 0}"
    how = "on servers" if choice.synchronizer == "ps" else "all-reduced"
    return f"{how} in {choice.parts.count} shards" if choice.parts else how


def _free(plan: Plan, config: Config, key: str) -> set[str]:
    """Return the variables for which no override says a key."""
    overrides = {one.name: override_of(one.name, config) for one in plan.variables}
    return {name for name, override in overrides.items() if override is None or getattr(override, key) is None}


def _with_options(plan: Plan, names: Collection[str], **changes: Any) -> Plan:
    """Return the plan with options changed for some variables."""
    requests = (
        replace(one, options=replace(one.options, **changes)) if one.name in names else one for one in plan.variables
    )
    return replace(plan, variables=tuple(requests))
