"""Search for the plan with the shortest simulated step, among the builders' plans and mixtures of them.

The configuration describes the network; machines are round figures (`cost.hardware.machine`), never measured ones,
since every process has to find the same plan. The plan's notes list the compared plans and the reasons of the choice.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Mesh, Pipeline, Remat, Sharding
from autograph_rewrite.diagnostics.amounts import duration, several
from autograph_rewrite.diagnostics.progress_line import progress_on
from autograph_rewrite.errors import PlanError, RewriteError
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.variable_ops import handle_uses
from autograph_rewrite.load.sharding_marks import mark_of
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES
from autograph_rewrite.plan.codecs import shown
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.notes import CHOSEN, SHOWN, RankedPlan
from autograph_rewrite.plan.parts.residence import Sharded, residence_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import default_options, override_of
from autograph_rewrite.strategies.assemble import assemble, trained_variables
from autograph_rewrite.strategies.builder import Choice, Parts, StrategyBuilder, TrainedVariable, over_replicas
from autograph_rewrite.strategies.per_variable import PerVariable
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.cost.search import Candidate, Evaluator, Search
    from autograph_rewrite.cost.tasks.result import Simulation


NODES = 240_000
"""How many nodes are simulated in all: fewer plans of larger graphs."""
FEWEST, MOST = 10, 60
"""Plans that are tried at least, and at most, for each of the two searches."""
AROUND = 12
"""Plans that are tried with a memory limit, in addition to the starts: each chooses its recomputation again."""
BUCKETS = (256 * 1024, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True)
class Auto:
    """Searches builders, placements of single variables, buckets and, where allowed, compressors.

    Attributes:
        builders: the builders whose plans are compared and mixed, by name.
        every: also those whose plans cannot be carried out yet.
        batch: examples of one step on all devices together, where the graph does not say; None: 32 for each.
    """

    builders: Mapping[str, StrategyBuilder]
    every: bool = False
    batch: int | None = None

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """The request with the shortest simulated step; its notes give the reasons.

        Raises:
            ConfigError: as the builders do.
        """
        with progress_on(sys.stderr, lines=False):
            return self._build(item, config)

    def _build(self, item: TrainingGraph, config: Config) -> Plan:
        from autograph_rewrite.cost.hardware.machine import Machine
        from autograph_rewrite.cost.search import Candidate, Evaluator, Search, first_possible
        from autograph_rewrite.cost.simulate import Hardware

        network = config.cluster.network if config.cluster is not None else None
        machine = Machine(onednn=False)  # counts more memory; workers with different processors choose alike
        evaluator = Evaluator(item, Hardware(machine, network), batch=self.batch)
        room, faults, ranked = room_of(config), list[str](), list[Compared]()
        examples = self.batch or EXAMPLES * len(config.devices or ()) * config.workers
        if room is not None or config.model_size > 1:
            evaluator.batch = examples  # the same for all meshes
        if room is None and wants_annotations(item, config):  # as if each device had separate cores
            apart = Evaluator(item, Hardware(replace(machine, apart=True), network), batch=examples)
            config = self._annotated(item, config, apart)
        if room is None:
            plans, dropped = plans_of(item, config, self.builders)
            compared = {name: Candidate(plan, evaluator.simulate(plan)) for name, plan in plans.items()}
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

    def _annotated(self, item: TrainingGraph, config: Config, evaluator: Evaluator) -> Config:
        """Return a configuration with the best cuts on its mesh."""
        build = self.builders[PLAIN].build
        path = MeshSearch(item, config, evaluator, lambda other: build(item, other)).run()
        return annotated(config, item, path[-1].cuts) if path else config

    def _mix(self, item: TrainingGraph, config: Config, search: Search, plans: list[Plan]) -> None:
        """Try other builders' choices for variables that are alike, the largest first."""
        trained = trained_variables(item, search.best.plan.graph_digest)
        chosen = in_mode(config, search.best.plan.mode)
        current = {request.name: _choice(request) for request in search.best.plan.variables}
        for alike in _alike(trained):
            first = alike[0]
            for other in _choices(first.name, plans):
                if other == current.get(first.name):
                    continue
                wanted = {**current, **dict.fromkeys((one.name for one in alike), other)}
                make = partial(_assembled, item, chosen, wanted)
                if search.offer(make, f"{_shown(alike)} {_worded(other)}"):
                    current = wanted

    def _bucket(self, config: Config, search: Search) -> None:
        """Try other sizes of buckets, where the configuration does not set one."""
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
    """Return the found plan under Auto's name, with the reasons and its rank among the others.

    Args:
        compared: the plans with which a search may begin.
        found: the plan that is taken.
        dropped: notes on plans that could not be made.
        others: all plans that were simulated before, in their order; empty: those that were compared.
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
        f"Auto simulated {search.evaluator.tried} plans for steps of {several(found.found.batch, 'example')}; a step "
        f"of the best takes {took}",
        f"a step of single builders: {', '.join(times)}",
        f"it began with {began}; " + ("; ".join(reasons) or "no change made it better"),
    )
    return replace(found.plan, strategy="Auto", notes=(*found.plan.notes, *notes)).named()


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
    groups = grouped(((one.role.sparse, one.shape, one.variable.dtype), one) for one in trained.values())
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
    """Return the variables for which no override sets a key."""
    overrides = {one.name: override_of(one.name, config) for one in plan.variables}
    return {name for name, override in overrides.items() if override is None or getattr(override, key) is None}


def _with_options(plan: Plan, names: Collection[str], **changes: Any) -> Plan:
    """Return the plan with options changed for some variables."""
    requests = (
        replace(one, options=replace(one.options, **changes)) if one.name in names else one for one in plan.variables
    )
    return replace(plan, variables=tuple(requests))


# The candidates: every builder's plan, with shared and with mirrored variables where that is open.


class Compared(NamedTuple):
    """A plan that was simulated.

    Attributes:
        name: for people.
        found: its simulation.
        fits: whether it fits the memory limit; None without a limit.
    """

    name: str
    found: Simulation
    fits: bool | None = None


def rows(compared: Sequence[Compared], chosen: str) -> list[str]:
    """Return plans as rows of a table, in their order, each with the verdict.

    Args:
        compared: the best first.
        chosen: the name of the chosen plan.
    """
    best = next(one.found.step_seconds for one in compared if one.name == chosen)
    return [
        str(
            RankedPlan(
                rank,
                one.found.step_seconds * 1e3,
                one.found.peak_bytes / 2**20,
                one.found.moved_bytes / 2**20,
                one.fits,
                _verdict(one, best, chosen),
                one.name,
            )
        )
        for rank, one in enumerate(compared[:SHOWN], start=1)
    ]


def _verdict(one: Compared, best: float, chosen: str) -> str:
    if one.name == chosen:
        return CHOSEN
    if one.fits is False:
        return "too large"
    if one.found.step_seconds < best:
        return "cannot be built"
    slower = one.found.step_seconds / best - 1 if best else 0.0  # a graph without work takes no time
    return f"{slower:.1%} slower" if slower >= 0.0005 else "no faster"


PLAIN = "AllReduce"
"""The builder that places no single variable."""


def with_settings(config: Config, **settings: Any) -> Config:
    """Return a configuration with other settings and the same source."""
    changed = config.model_copy(update=settings)
    changed._source = config._source
    return changed


def in_mode(config: Config, mode: str | None) -> Config:
    """Return a configuration with its variables in one mode, and nothing compressed."""
    section = config.strategy.model_copy(update={"variables": mode, "compressor": "none"})
    return with_settings(config, strategy=section)


def plans_of(
    item: TrainingGraph, config: Config, builders: Mapping[str, StrategyBuilder]
) -> tuple[dict[str, Plan], list[str]]:
    """Return the plans of all builders that have one for this item, and why the others have none.

    Args:
        item: it is only read.

    Raises:
        RewriteError: none has one.
    """
    plans: dict[str, Plan] = {}
    errors: dict[str, RewriteError] = {}
    modes = modes_of(config)
    if config.model_size > 1 and config.workers == 1 and len(config.replicas) == 1:
        builders = {PLAIN: builders[PLAIN]}  # one replica has everything, so builders do not differ
    for mode in modes:
        chosen = in_mode(config, mode)
        for builder, made in builders.items():
            name = f"{builder} ({mode})" if len(modes) > 1 else builder
            try:
                plans[name] = made.build(item, chosen)
            except RewriteError as error:
                errors[name] = error
    if not plans:
        raise next(iter(errors.values()))
    return plans, [f"{name} has no plan: {error.problem}" for name, error in errors.items()]


def modes_of(config: Config) -> tuple[str | None, ...]:
    """Return where variables may live; mirrored ones need distinct devices of several replicas, and no stages."""
    known = config.strategy.variables
    if known or config.workers > 1:
        return (known,)
    devices = config.devices or ()
    if config.model_size > 1 and len(config.replicas) == 1:
        return ("shared",)
    apart = len(set(devices)) == len(devices) and config.pipeline is None
    return ("shared", "mirrored") if apart else ("shared",)


# Auto with a memory limit: which stages, micro-batches and recomputation let a step fit the memory of a device.
#
#     1. every builder's plan as it is, and ZeRO 1 and 2       of those that no other beats in time and in memory:
#     2. model axes, with annotations that a search finds       (`MeshSearch`)
#     3. 2, 4, 8, ... micro-batches; stages on the devices      all plans by their time, the shortest first
#     4. what does not fit computes activations again          as long as it is shorter than what fits
#
# Recomputation never makes a step shorter, so a plan that takes longer than one that fits is not tried with it. All
# limits are counts, so that every process finds the same plans.

RESERVE = 0.05
"""The part of the memory that is left free: a measured peak may exceed the predicted one by so much."""
NODES_FITTING = 1_000_000
"""About how many nodes are simulated in all."""
FEWEST_FITTING = 40
"""Plans that are tried at least."""
COUNTS = (8, 4, 16, 2, 6, 3, 1)
"""Numbers of micro-batches, in the order in which they are tried: with few, stages wait; with many, ops are small."""
FOR_RECOMPUTATION = 0.25
"""The part of the plans that is left for recomputation, where a graph is so large that not all are tried."""
LEAST, CHEAPEST = "sqrt", "save_matmuls"
"""The policies that keep the least, and that recompute the least."""
ATTEMPTS = 4
"""How often a budget is made smaller."""


def _zero(stage: int) -> PerVariable:
    """Return the builder that shards the state of the optimizer (1), and the sums of gradients (2)."""
    return PerVariable(f"ZeRO {stage}", lambda one, replicas: over_replicas(one, replicas, stage=stage))


SHARING: Mapping[str, StrategyBuilder] = {one.name: one for one in (_zero(1), _zero(2))}
"""Builders without a name in configurations; FSDP is the third stage."""


class Start(NamedTuple):
    """A plan from which a search may begin.

    Attributes:
        config: the configuration that a user would write for it.
        candidate: the plan with its time and memory.
    """

    config: Config
    builder: str
    candidate: Candidate

    @property
    def name(self) -> str:
        """Its description, for people."""
        config, mode = self.config, self.config.mode
        parts = [f"{self.builder} ({mode})"]
        if config.mesh is not None and config.model_size > 1:
            parts.append(f"mesh {len(config.replicas)} x {config.model_size}")
            parts += [f"{one.match} split {list(one.split)}" for one in config.sharding if one.split]
        if config.pipeline is not None:
            parts.append(f"{config.pipeline.stages} stages")
        count = _microbatches(config)
        parts += [f"{count} micro-batches"] if count > 1 else []
        parts += [f"remat {config.remat.policy}"] if config.remat.policy != "none" else []
        parts += [f"in stages {', '.join(map(str, config.remat.stages))}"] if config.remat.stages else []
        return ", ".join(parts)


def _microbatches(config: Config) -> int:
    """Return into how many micro-batches each replica's examples are cut, with stages or without."""
    return (config.pipeline.microbatches if config.pipeline is not None else config.microbatches) or 1


@dataclass
class Starts:
    """Plans that have been simulated.

    Attributes:
        item: normalised.
        config: of the user.
        builders: by name.
        limit: the bytes that a predicted peak may have.
        errors: of plans that could not be made.
        faults: why annotations could not be tried, where that is a bug of this package.
    """

    item: TrainingGraph
    config: Config
    evaluator: Evaluator
    builders: Mapping[str, StrategyBuilder]
    limit: int
    found: list[Start] = field(default_factory=list)
    errors: list[RewriteError] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _known: set[Plan] = field(default_factory=set)
    _left_free: float = 0.0

    def fitting(self) -> list[Start]:
        """Return those that fit, the shortest step first.

        Raises:
            PlanError: none fits; it names the least memory that was found.
            RewriteError: there is no plan at all.
        """
        recomputes = "policy" not in self.config.remat.model_fields_set
        self._left_free = FOR_RECOMPUTATION if recomputes else 0.0
        self._layouts()
        self._left_free = 0.0
        if not self.found:
            raise self.errors[0]
        if recomputes:
            self._recompute()
        fits = [start for start in self.found if start.candidate.fits(self.limit)]
        if not fits:
            self._raise_least()
        return sorted(fits, key=lambda start: start.candidate.key)

    def ranked(self) -> list[Compared]:
        """Return the plans that were simulated: those that fit by time, then the rest by peak."""
        room = self.limit

        def key(start: Start) -> tuple[bool, float, tuple[float, int, int]]:
            one = start.candidate
            return not one.fits(room), 0.0 if one.fits(room) else one.found.peak_bytes, one.key

        ordered = sorted(self.found, key=key)
        return [Compared(one.name, one.candidate.found, one.candidate.fits(room)) for one in ordered]

    def _layouts(self) -> None:
        """Try every builder, then micro-batches and stages with those that no other beats."""
        self._annotate()
        idle = wants_annotations(self.item, self.config) and bool(self.found)  # without cuts, the mesh would be idle
        for mode in () if idle else modes_of(self.config):
            for builder in self._builders if mode == "mirrored" else self.builders:
                self._try(in_mode(self.config, mode), builder)
        front = list(_front(self.found))
        tries = [*self._over_time(front), *self._in_stages(front)]
        tries.sort(key=lambda one: COUNTS.index(_microbatches(one[0])))
        for config, builder in tries:  # of a large graph, not all are tried
            self._try(config, builder)

    def _over_time(self, front: list[Start]) -> Iterator[tuple[Config, str]]:
        """Yield micro-batches with the plans that no other beats."""
        if self.config.microbatches == 1 and self.config.pipeline is None:
            for count in self._counts(len(self.config.devices or ()) * self.config.workers):
                for start in front:
                    yield with_settings(start.config, microbatches=count), start.builder

    def _in_stages(self, front: list[Start]) -> Iterator[tuple[Config, str]]:
        """Yield stages with whole layers on each device, and with the best annotations of each mesh.

        Args:
            front: the plans without stages that no other beats. If their variables are mirrored, stages are tried with
                mirrored variables, too.
        """
        devices, chosen = len(self.config.devices or ()), self.config.strategy.variables
        by_size = grouped((start.config.model_size, start) for start in self.found)
        cut = [start for size in sorted(by_size.keys() - {1}) for start in _front(by_size[size])]
        kinds = [(self.config, start.builder, mode) for start in front for mode in ("shared", start.config.mode)]
        kinds += [(start.config, start.builder, mode) for start in cut for mode in ("shared", start.config.mode)]
        for stages in self._stages():
            for base, builder, mode in kinds:
                replicas, left = divmod(devices, stages * base.model_size)
                if left or (replicas == 1 and mode != (chosen or "shared")) or chosen not in (None, mode):
                    continue
                mesh = Mesh(data=replicas, model=base.model_size) if base.model_size > 1 else None
                for count in (1, *self._counts(replicas)):
                    section = Pipeline(stages=stages, microbatches=count)
                    yield with_settings(in_mode(base, mode), pipeline=section, mesh=mesh), builder

    def _annotate(self) -> None:
        """Try model axes, with the cuts that a search finds."""
        meshes = meshes_of(self.item, self.config)
        if not meshes:
            return
        build, mode = self._builders[PLAIN].build, "shared" if self.config.mode == "shared" else None
        search = MeshSearch(
            self.item, in_mode(meshes[0], mode), self.evaluator, lambda config: build(self.item, config), self.limit
        )
        for config in annotated_configs(search, meshes[1:]):
            for chosen in modes_of(self.config) if len(config.replicas) > 1 else ("shared",):
                self._try(in_mode(config, chosen), PLAIN)
        self.faults += search.faults

    def _recompute(self) -> None:
        """Try recomputation with plans that do not fit, if they take less time than those that fit."""
        kinds = [[start for start in self.found if (start.config.pipeline is None) is plain] for plain in (True, False)]
        for start in [start for kind in kinds for start in _front(kind)]:  # without stages, then with stages
            step = start.candidate.found
            held = max(device.variable_bytes for device in step.devices)  # which no recomputation makes less
            if start.candidate.fits(self.limit) or held >= self.limit or step.step_seconds >= self._shortest:
                continue
            if self._by_policy(start, LEAST):
                self._by_policy(start, CHEAPEST)
                self._budget(start)

    def _by_policy(self, start: Start, policy: str) -> bool:
        """Recompute by a policy; return whether that fits.

        With stages, recompute in as few as fit, from the first on: these keep the most micro-batches.
        """
        made = self._recomputed(start, Remat(policy=policy))
        if made is None or not made.candidate.fits(self.limit):
            return False  # with fewer stages that recompute, more would be kept
        if (pipeline := start.config.pipeline) is None:
            return True
        # Each stage adds about as much time as the others, so only so few are tried as would beat what already fits.
        before, after = start.candidate.found.step_seconds, made.candidate.found.step_seconds
        counts = [
            n for n in range(1, pipeline.stages) if before + (after - before) * n / pipeline.stages < self._shortest
        ]

        def fits(count: int) -> bool:
            fewer = self._recomputed(start, Remat(policy=policy, stages=tuple(range(count))))
            return fewer is not None and fewer.candidate.fits(self.limit)

        bisect_left(counts, True, key=fits)
        return True

    def _recomputed(self, start: Start, section: Remat) -> Start | None:
        return self._try(with_settings(start.config, remat=section), start.builder)

    def _budget(self, start: Start) -> None:
        """Search for the largest budget with which the whole step fits: a device may hold more than a budget counts."""
        room = self.limit
        for _ in range(ATTEMPTS):
            made = self._recomputed(start, Remat(policy=f"budget:{room}"))
            if made is None or made.candidate.fits(self.limit):
                return
            room = room * self.limit // made.candidate.found.peak_bytes

    @property
    def _builders(self) -> Mapping[str, StrategyBuilder]:
        return {**self.builders, **SHARING}

    @property
    def _shortest(self) -> float:
        """The time of the shortest step that fits."""
        fits = (start.candidate for start in self.found if start.candidate.fits(self.limit))
        return min((candidate.found.step_seconds for candidate in fits), default=float("inf"))

    def _try(self, config: Config, builder: str) -> Start | None:
        """Simulate one plan; None where it cannot be made, is known, or enough plans were tried."""
        from autograph_rewrite.cost.search import Candidate

        most = max(FEWEST_FITTING, NODES_FITTING // max(1, len(self.item.graph)))
        if self.evaluator.tried >= most * (1 - self._left_free):
            return None
        try:
            plan = self._builders[builder].build(self.item, config)
            alike = replace(plan, id="", strategy="", notes=())
            if alike in self._known:
                return None
            self._known.add(alike)
            start = Start(config, builder, Candidate(plan, self.evaluator.simulate(plan)))
        except RewriteError as error:
            self.errors.append(error)
            return None
        self.found.append(start)
        return start

    def _counts(self, replicas: int) -> list[int]:
        """Return the numbers of micro-batches into which the examples of each replica can be cut."""
        shapes = ((info.shape, info.batch_axis) for info in self.item.inputs.values())
        sizes = [shape[axis] for shape, axis in shapes if shape is not None and axis is not None]
        known = [size // max(1, replicas) for size in sizes if size]
        return [count for count in COUNTS if count > 1 and all(size >= count for size in known)]

    def _stages(self) -> Iterator[int]:
        """Yield how many stages the devices of this process can hold, if the configuration leaves that open."""
        config, count = self.config, len(self.config.devices or ())
        is_open = config.pipeline is None and config.mesh is None and config.workers == 1 and config.microbatches == 1
        if is_open and len(set(config.devices or ())) == count:
            yield from (stages for stages in range(2, count + 1) if count % stages == 0)

    def _raise_least(self) -> None:
        least = min(self.found, key=lambda start: start.candidate.found.peak_bytes)
        peak = least.candidate.found.peak_bytes
        wanted = -(-peak * 1000 // round(1000 * (1 - RESERVE)))
        limit = self.config.memory_limit or 0
        raise PlanError(
            f"{self.config.where('memory_limit')}: memory_limit is {limit:,} B; of {self.evaluator.tried} plans the "
            f"one that needs least takes {peak:,} B on a device for "
            f"{several(least.candidate.found.batch, 'example')}: {least.name}",
            hint=f"set memory_limit to {wanted} or more ({RESERVE:.0%} is left free), or give it more devices or a "
            "smaller batch",
        )


def room_of(config: Config) -> int | None:
    """Return the bytes that a predicted peak may have; None without a limit."""
    return None if config.memory_limit is None else int(config.memory_limit * (1 - RESERVE))


def _front(starts: list[Start]) -> Iterator[Start]:
    """Yield the starts that no other beats both in time and in memory."""
    least = float("inf")
    for start in sorted(starts, key=lambda start: start.candidate.key):
        if start.candidate.found.peak_bytes < least:
            least = start.candidate.found.peak_bytes
            yield start


# Search of annotations: seeds completed by propagation, then joined as long as that helps; simulation is the judge.
#
#     seed          inner (1)                        its product is cut, the next layer reads outer in blocks of rows:
#     completed     inner (1), outer (0)             Megatron's pair; biases and slots follow in any case
#     joined        + query (1), key (1), value (1), output (0)     where a step is better with them
#     without       what a step is better without, once it fits
#
# PartIR and automap (Schaarschmidt et al., 2021) complete seeds by propagation, too; alpa (Zheng et al., 2022) and
# Unity (Unger et al., 2022) choose a sharding per op. The number of nodes limits that of plans, and nothing is random,
# so every process finds the same.


NODES_ON_AXES = 120_000
"""About how many nodes are partitioned in all."""
COMPLETIONS = 4
"""How often the variables that are read in blocks are cut, too."""
JOINS = 10
"""How many plans are left for joining useful cuts."""
BETTER = 0.999
Cuts = Mapping[str, int]
"""The dimension that is cut, by variable."""
Build = Callable[[Config], Plan]
T = TypeVar("T")


class Priced(NamedTuple):
    """Cuts, and the simulation of a step with them."""

    cuts: Cuts
    found: Simulation


@dataclass
class MeshSearch:
    """A search for the variables to cut on one mesh.

    Attributes:
        item: normalised.
        config: of the user, with the mesh.
        build: makes the request of a configuration.
        limit: the bytes that a predicted peak may have; None: only time counts.
        path: the successive best cuts; the first cuts nothing.
        faults: why cuts could not be tried, where that is a bug of this package.
        left: how many more plans may be made.
    """

    item: TrainingGraph
    config: Config
    evaluator: Evaluator
    build: Build
    limit: int | None = None
    path: list[Priced] = field(default_factory=list)
    tried: list[Priced] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left: int = 0
    _trained: frozenset[str] = frozenset()

    def run(self) -> list[Priced]:
        """Return the successive best cuts, the best last; empty where no plan can be made."""
        self._trained = frozenset(trained_variables(self.item))
        self.left = max(FEWEST, min(MOST, NODES_ON_AXES // max(1, len(self.item.graph))))
        base = self._price({})
        if base is None:
            return []
        self.path = [base]
        joined: list[Cuts] = []
        useful = [one for one in self._completed() if self._helps(one.found, base.found)]
        for one in sorted(useful, key=lambda one: self._key(one.found)):
            fits_beside = all(self.best.cuts.get(name, dim) == dim for name, dim in one.cuts.items())
            if fits_beside and self._offer({**self.best.cuts, **one.cuts}):
                joined.append(one.cuts)
        if self.limit is not None and self.best.found.peak_bytes <= self.limit:
            for cuts in joined[:-1]:  # the last one is needed
                self._offer({name: dim for name, dim in self.best.cuts.items() if name not in cuts})
        return self.path

    @property
    def best(self) -> Priced:
        """The best so far."""
        return self.path[-1]

    def _completed(self) -> list[Priced]:
        """Return the seeds that no earlier seed led to, each with the cuts that follow from it."""
        found: list[Priced] = []
        known: list[Cuts] = []
        for seed in seeds_of(self.item, self._devices):
            cuts = self._complete(seed, known) if self.left > JOINS else None
            if cuts is None:
                continue
            known.append(cuts)
            priced = self._price(cuts)
            found += [priced] if priced is not None else []
        return found

    def _complete(self, seed: Seed, known: Iterable[Cuts]) -> Cuts | None:
        """Return a seed with the cuts that follow from it; None where these are known, or no plan can be made."""
        cuts: dict[str, int] = seed.cuts
        for _ in range(COMPLETIONS):
            if any(cuts.items() <= one.items() for one in known):
                return None
            more = self._follows(cuts)
            if not more:
                return None if more is None else cuts
            if any(more.items() <= one.items() for one in known) and len(seed.dims) == 1:
                return None  # it leads to the cuts of an earlier seed
            cuts |= more
        return cuts

    def _follows(self, cuts: Cuts) -> Cuts | None:
        """Return the other matrices that the pass cuts, and those of which a reader takes blocks."""
        made = self._tried_with(cuts, self.evaluator.cut)
        if made is None:
            return None
        cut, edges = made
        read = [(edge.value, edge.to) for edge in edges if edge.lowering == "slice" and edge.to.startswith("split(")]
        found = wanted_in_blocks(self.item, {value: int(to[6:-1]) for value, to in read}) | cut
        return {name: dim for name, dim in found.items() if name not in cuts and self._can_be_cut(name, dim)}

    def _can_be_cut(self, name: str, dim: int) -> bool:
        shape = self.item.variables[name].shape or ()
        return name in self._trained and len(shape) > 1 and can_be_cut(shape, dim, self._devices)

    def _offer(self, cuts: Cuts) -> bool:
        """Keep cuts if a step is better with them; return whether it is."""
        priced = next((one for one in self.tried if one.cuts == cuts), None) or self._price(cuts)
        if priced is None or not self._is_better(priced.found, self.best.found):
            return False
        self.path.append(priced)
        return True

    # The time and memory of a plan.

    @property
    def _devices(self) -> int:
        return self.config.model_size

    def _price(self, cuts: Cuts) -> Priced | None:
        found = self._tried_with(cuts, self.evaluator.simulate_once)
        if found is None:
            return None
        self.tried.append(Priced(cuts, found))
        return self.tried[-1]

    def _tried_with(self, cuts: Cuts, run: Callable[[Plan], T]) -> T | None:
        """Return the result of `run` on the plan with some cuts; None where it fails, or enough plans were tried."""
        if self.left <= 0:
            return None
        self.left -= 1
        try:
            return run(self.build(annotated(self.config, self.item, cuts)))
        except RewriteError:  # no error: the user did not ask for these cuts
            return None
        except Exception as error:  # a bug: noted in the plan
            self.faults.append(f"cuts of {', '.join(sorted(cuts))} were not tried: {type(error).__name__}: {error}")
            return None

    def _key(self, found: Simulation) -> tuple[int, float]:
        return max(0, found.peak_bytes - (self.limit or found.peak_bytes)), found.step_seconds

    def _helps(self, found: Simulation, base: Simulation) -> bool:
        return found.step_seconds < base.step_seconds or (self.limit is not None and found.peak_bytes < base.peak_bytes)

    def _is_better(self, found: Simulation, than: Simulation) -> bool:
        over, seconds = self._key(found)
        over_before, seconds_before = self._key(than)
        return over < BETTER * over_before or (over <= over_before and seconds < BETTER * seconds_before)


def annotated(config: Config, item: TrainingGraph, cuts: Cuts) -> Config:
    """Return a configuration with entries of `sharding` that cut some variables of an item and no others.

    Args:
        config: with a model axis.
        cuts: the dimension by variable.
    """
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, dim in cuts.items():
        split = [config.model_size if i == dim else 1 for i in range(len(item.variables[name].shape or ()))]
        found.setdefault((pattern_of(name), tuple(split)), []).append(name)
    made: list[Sharding] = []
    for (pattern, split_alike), names in found.items():
        meant = [name for name in item.variables if re.fullmatch(pattern, name)]
        matches = [pattern] if set(meant) == set(names) else [re.escape(name) for name in names]
        made += [Sharding(match=match, split=split_alike) for match in matches]
    return with_settings(config, sharding=(*config.sharding, *made))


def on_mesh(config: Config, data: int, model: int) -> Config:
    """Return a configuration with a mesh."""
    return with_settings(config, mesh=Mesh(data=data, model=model))


# Seeds: the variables that a model axis may cut, those of repeated layers together, each along every dimension.
#
#     layer_0/query/w [128, 128], layer_1/query/w [128, 128]     one group, seeds (1) and (0)
#     dense/kernel [64, 64], dense_1/kernel, dense_2/kernel      and in turn: (1) (0) (1), (0) (1) (0)
#     conv/kernel [3, 3, 16, 64]                                 seeds (3) and (2): channels
#
# Repeated layers have names that differ in numbers. alpa (Zheng et al., 2022) groups them by clustering layers, Unity
# (Unger et al., 2022) by substitutions that apply everywhere. A dimension counts if the devices divide it.

_NUMBERS, _NUMBERED = re.compile(r"\d+"), re.compile(r"_?\d+")
_CONVOLUTION = re.compile(r".*Conv\d?D.*")


class Seed(NamedTuple):
    """Variables to cut along one dimension, or alternately along two.

    Attributes:
        names: of variables that are alike.
        dims: the dimension to cut, cyclically over the names.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]

    @property
    def cuts(self) -> dict[str, int]:
        """The dimension by variable."""
        return {name: self.dims[i % len(self.dims)] for i, name in enumerate(self.names)}


def pattern_of(name: str) -> str:
    """Return a regular expression for the name of a variable in all layers."""
    return r"\d+".join(re.escape(part) for part in _NUMBERS.split(name))


def seeds_of(item: TrainingGraph, devices: int) -> Iterator[Seed]:
    """Yield seeds that can be cut into a block for each device, the largest group first; alternating cuts come last.

    Args:
        item: normalised.
        devices: on the model axis.
    """
    groups = grouped(
        ((_NUMBERED.sub("", name), one.shape, one.variable.dtype), one)
        for name, one in trained_variables(item).items()
        if len(one.shape) > 1 and not one.obstacle
    )
    found: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    for alike in sorted(groups.values(), key=lambda group: -sum(one.variable.nbytes for one in group)):
        dims = tuple(dim for dim in _dimensions(item, alike[0]) if can_be_cut(alike[0].shape, dim, devices))
        found.append((tuple(one.name for one in alike), dims))
    for names, dims in found:
        yield from (Seed(names, (dim,)) for dim in dims)
    for names, dims in found:
        if len(names) > 1 and len(dims) == 2:
            yield from (Seed(names, turn) for turn in (dims, dims[::-1]))


def can_be_cut(shape: tuple[int | None, ...], dim: int, devices: int) -> bool:
    """Return whether each device gets a block of the same size.

    Args:
        devices: on the model axis.
    """
    size = shape[dim] if dim < len(shape) else None
    return size is not None and size >= devices and size % devices == 0


def wanted_in_blocks(item: TrainingGraph, sliced: Mapping[str, int]) -> dict[str, int]:
    """Return the variables of which a reader takes blocks, with the dimension.

    Args:
        item: normalised.
        sliced: values that are cut for their readers, by name, and the dimension.
    """
    handles = {variable.handle: name for name, variable in item.variables.items()}
    found: dict[str, int] = {}
    for value, dim in sliced.items():
        node = item.graph.nodes.get(value.partition(":")[0])
        while node is not None and node.op in ("Identity", "Cast") and node.inputs:
            node = node.inputs[0].node
        if node is not None and node.op == "ReadVariableOp":
            name = handles.get(node.inputs[0].node.name)
            if name is not None:
                found.setdefault(name, dim)
    return found


def _dimensions(item: TrainingGraph, one: TrainedVariable) -> list[int]:
    handle, rank = item.graph.nodes.get(one.variable.handle), len(one.shape)
    reads = [use.node for use in handle_uses(handle) if use.node.op == "ReadVariableOp"] if handle is not None else []
    is_filter = any(_CONVOLUTION.fullmatch(node.op) for read in reads for node, _ in read.output().uses)
    return list(range(rank - 1, rank - 3 if is_filter else -1, -1))


# Annotations for a configuration: the possible meshes of its devices, and the cuts on each.
#
#     4 devices     2 x 2: searched     1 x 4: what was found for 2, as far as 4 devices divide it
#
# A mesh or a `sharding` that the user has written stays as it is.

KEPT = 4
"""How many of the successive best cuts are tried on other meshes, and with recomputation."""


def wants_annotations(item: TrainingGraph, config: Config) -> bool:
    """Return whether there is a model axis, and neither configuration nor graph places a tensor on it."""
    is_open = config.model_size > 1 and config.mesh is not None and len(config.mesh.model_axes) == 1
    return is_open and not config.sharding and not any(mark_of(name) for name in item.graph.nodes)


def meshes_of(item: TrainingGraph, config: Config) -> list[Config]:
    """Return the configurations of meshes with a model axis, the smallest first; empty where the user rules it out."""
    if config.mesh is not None:
        return [config] if wants_annotations(item, config) else []
    devices, count = config.devices or (), len(config.devices or ())
    alone = config.cluster is None and config.workers == 1 and len(set(devices)) == count
    is_open = alone and config.pipeline is None and not config.sharding
    if not is_open or any(mark_of(name) for name in item.graph.nodes):
        return []
    return [on_mesh(config, count // model, model) for model in range(2, count + 1) if count % model == 0]


def annotated_configs(search: MeshSearch, others: list[Config]) -> Iterator[Config]:
    """Yield configurations with annotations: the best cuts on the searched mesh, then the same on others."""
    found = [one.cuts for one in search.run() if one.cuts][-KEPT:]
    for cuts in found:
        yield annotated(search.config, search.item, cuts)
    for config in others:
        for cuts in found:
            if _fits(search.item, cuts, config.model_size):
                yield annotated(config, search.item, cuts)


def _fits(item: TrainingGraph, cuts: Cuts, devices: int) -> bool:
    return all(can_be_cut(item.variables[name].shape or (), dim, devices) for name, dim in cuts.items())
