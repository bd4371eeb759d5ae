"""Auto with a memory limit: which stages, micro-batches and recomputation let a step fit the memory of a device.

    1. every builder's plan as it is, and ZeRO 1 and 2       of those that no other beats in time and in memory:
    2. model axes, with annotations that a search finds       (`mesh_search`)
    3. 2, 4, 8, ... micro-batches; stages on the devices      all plans by their time, the shortest first
    4. what does not fit computes activations again          as long as it is shorter than what fits

Recomputation never makes a step shorter, so what takes longer than a plan that fits is not tried with it. All of it is
limited by counts, so that every process finds the same plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Pipeline, Remat
from autograph_rewrite.errors import PlanError, RewriteError
from autograph_rewrite.strategies.builder import StrategyBuilder, over_replicas
from autograph_rewrite.strategies.candidates import PLAIN, Compared, in_mode, modes_of, with_settings
from autograph_rewrite.strategies.mesh_search import MeshSearch, annotated_configs, meshes_of, wants_annotations
from autograph_rewrite.strategies.per_variable import PerVariable
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.cost.search import Candidate, Evaluator

RESERVE = 0.05
"""The part of the memory that is left free: so far may a measured peak lie above the predicted one."""
NODES = 1_000_000
"""So many nodes are simulated in all, about."""
FEWEST = 40
"""Plans that are tried at least."""
COUNTS = (2, 3, 4, 6, 8, 16)
"""Of micro-batches."""
POLICIES = ("save_matmuls", "sqrt")
ATTEMPTS = 4
"""How often a budget is made smaller."""


def _zero(stage: int) -> PerVariable:
    """Return the builder that shares out the state of the optimizer (1), and the sums of gradients (2)."""
    return PerVariable(f"ZeRO {stage}", lambda one, replicas: over_replicas(one, replicas, stage=stage))


SHARING: Mapping[str, StrategyBuilder] = {one.name: one for one in (_zero(1), _zero(2))}
"""Builders beside those that have a name in configurations; FSDP is the third stage."""


class Start(NamedTuple):
    """A plan from which a search may begin.

    Attributes:
        config: what a user would have written for it.
        builder: by name.
        candidate: the plan and what it takes.
    """

    config: Config
    builder: str
    candidate: Candidate

    @property
    def name(self) -> str:
        """What it is, for people."""
        config, mode = self.config, self.config.mode
        parts = [f"{self.builder} ({mode})"]
        if config.mesh is not None and config.model_size > 1:
            parts.append(f"mesh {len(config.replicas)} x {config.model_size}")
            parts += [f"{one.match} split {list(one.split)}" for one in config.sharding if one.split]
        if config.pipeline is not None:
            parts.append(f"{config.pipeline.stages} stages")
        count = config.pipeline.microbatches if config.pipeline is not None else config.microbatches
        parts += [f"{count} micro-batches"] if (count or 1) > 1 else []
        parts += [f"remat {config.remat.policy}"] if config.remat.policy != "none" else []
        parts += [f"in stages {', '.join(map(str, config.remat.stages))}"] if config.remat.stages else []
        return ", ".join(parts)


@dataclass
class Starts:
    """Plans that have been simulated.

    Attributes:
        item: normalised.
        config: of the user.
        evaluator: simulates.
        builders: by name.
        limit: the bytes that a predicted peak may have.
        found: the plans.
        errors: why others could not be made.
        faults: why annotations could not be tried, where that is a fault of this package.
    """

    item: TrainingGraph
    config: Config
    evaluator: Evaluator
    builders: Mapping[str, StrategyBuilder]
    limit: int
    found: list[Start] = field(default_factory=list)
    errors: list[RewriteError] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fitting(self) -> list[Start]:
        """Return those that fit, the shortest step first.

        Raises:
            PlanError: none does; it says the least memory that was found.
            RewriteError: there is no plan at all.
        """
        self._layouts()
        if not self.found:
            raise self.errors[0]
        if "policy" not in self.config.remat.model_fields_set:
            self._recompute()
        fits = [start for start in self.found if start.candidate.fits(self.limit)]
        if not fits:
            self._raise_least()
        return sorted(fits, key=lambda start: start.candidate.key)

    def ranked(self) -> list[Compared]:
        """Return the plans that were simulated: what fits by time, the rest by peak."""
        room = self.limit

        def key(start: Start) -> tuple[bool, float, tuple[float, int, int]]:
            one = start.candidate
            return not one.fits(room), 0.0 if one.fits(room) else one.found.peak_bytes, one.key

        ordered = sorted(self.found, key=key)
        return [Compared(one.name, one.candidate.found, one.candidate.fits(room)) for one in ordered]

    def _layouts(self) -> None:
        """Try every builder, then micro-batches and stages with those that no other beats."""
        self._annotate()
        idle = wants_annotations(self.item, self.config) and bool(self.found)  # a mesh on which nothing is cut
        for mode in () if idle else modes_of(self.config):
            for builder in self._builders if mode == "mirrored" else self.builders:
                self._try(in_mode(self.config, mode), builder)
        front = list(_front(self.found))
        if self.config.microbatches == 1 and self.config.pipeline is None:
            for count in self._counts(len(self.config.devices or ()) * self.config.workers):
                for start in front:
                    self._try(with_settings(start.config, microbatches=count), start.builder)
        in_stages = dict.fromkeys(start.builder for start in front)
        for stages in self._stages():
            for count in (1, *self._counts(len(self.config.devices or ()) // stages)):
                section = Pipeline(stages=stages, microbatches=count)
                for builder in in_stages:
                    self._try(with_settings(in_mode(self.config, "shared"), pipeline=section), builder)

    def _annotate(self) -> None:
        """Try model axes, with what a search finds to cut on them."""
        meshes = meshes_of(self.item, self.config)
        if not meshes:
            return
        build, mode = self._builders[PLAIN].build, "shared" if self.config.mode == "shared" else None
        search = MeshSearch(
            self.item,
            in_mode(meshes[0], mode),
            self.evaluator,
            lambda config: build(self.item, config),
            self.limit,
        )
        for config in annotated_configs(search, meshes[1:]):
            for chosen in modes_of(self.config) if len(config.replicas) > 1 else ("shared",):
                self._try(in_mode(config, chosen), PLAIN)
        self.faults += search.faults

    def _recompute(self) -> None:
        """Let what does not fit compute activations again, if it takes less time than what does."""
        for start in list(_front(self.found)):
            if start.candidate.fits(self.limit) or start.candidate.found.step_seconds >= self._shortest:
                continue
            for section in _sections(start.config):
                self._try(with_settings(start.config, remat=section), start.builder)
            self._budget(start)

    def _budget(self, start: Start) -> None:
        """Look for the largest budget with which the whole step fits: a device may hold more than a budget counts."""
        room = self.limit
        for _ in range(ATTEMPTS):
            section = Remat(policy=f"budget:{room}")
            made = self._try(with_settings(start.config, remat=section), start.builder)
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
        """Simulate one plan; None where there is no such plan, or enough has been tried."""
        from autograph_rewrite.cost.search import Candidate

        if self.evaluator.tried >= max(FEWEST, NODES // max(1, len(self.item.graph))):
            return None
        try:
            plan = self._builders[builder].build(self.item, config)
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
        return [count for count in COUNTS if all(size >= count for size in known)]

    def _stages(self) -> Iterator[int]:
        """Yield how many stages the devices of this process can hold, if nothing speaks against any."""
        config, count = self.config, len(self.config.devices or ())
        is_open = config.pipeline is None and config.mesh is None and config.workers == 1 and config.microbatches == 1
        apart = len(set(config.devices or ())) == count and config.strategy.variables != "mirrored"
        if is_open and apart:
            yield from (stages for stages in range(2, count + 1) if count % stages == 0)

    def _raise_least(self) -> None:
        least = min(self.found, key=lambda start: start.candidate.found.peak_bytes)
        peak = least.candidate.found.peak_bytes
        wanted = -(-peak * 1000 // round(1000 * (1 - RESERVE)))
        limit = self.config.memory_limit or 0
        raise PlanError(
            f"{self.config.where('memory_limit')}: memory_limit is {limit:,} B; of {self.evaluator.tried} plans the "
            f"one that needs least takes {peak:,} B on a device: {least.name}",
            hint=f"set memory_limit to {wanted} or more ({RESERVE:.0%} is left free), or give it more devices or a "
            "smaller batch",
        )


def room_of(config: Config) -> int | None:
    """Return the bytes that a predicted peak may have; None without a limit."""
    return None if config.memory_limit is None else int(config.memory_limit * (1 - RESERVE))


def _sections(config: Config) -> Iterator[Remat]:
    """Yield what may be computed again; with stages, also in the first of them alone, which keep most micro-batches."""
    stages = config.pipeline.stages if config.pipeline is not None else 0
    for policy in POLICIES:
        yield from (Remat(policy=policy, stages=tuple(range(count))) for count in range(1, stages))
        yield Remat(policy=policy)


def _front(starts: list[Start]) -> Iterator[Start]:
    """Yield those that no other beats both in time and in memory."""
    least = float("inf")
    for start in sorted(starts, key=lambda start: start.candidate.key):
        if start.candidate.found.peak_bytes < least:
            least = start.candidate.found.peak_bytes
            yield start
