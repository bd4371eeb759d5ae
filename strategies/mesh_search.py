"""Search of annotations: seeds completed by propagation, then joined as long as that helps; simulation is the judge.

    seed          inner (1)                        its product is cut, and the next layer reads outer in blocks of rows:
    completed     inner (1), outer (0)             Megatron's pair; biases and slots follow in any case
    joined        + query (1), key (1), value (1), output (0)     where a step is better with them
    without       what a step is better without, once it fits

Seeds that propagation completes are PartIR's and automap's way (Schaarschmidt et al., 2021); alpa (Zheng et al., 2022)
and Unity (Unger et al., 2022) choose a sharding per op. How many plans are tried is limited by their nodes, and nothing
is random, so every process finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Mesh, Sharding
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import trained_variables
from autograph_rewrite.strategies.candidates import with_settings
from autograph_rewrite.strategies.mesh_seeds import Seed, can_be_cut, pattern_of, seeds_of, wanted_in_blocks
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.cost.search import Evaluator
    from autograph_rewrite.cost.tasks.result import Simulation

NODES = 120_000
"""So many nodes are partitioned in all, about."""
FEWEST, MOST = 10, 60
"""Plans that are tried at least, and at most."""
COMPLETIONS = 4
"""How often what is read in blocks is cut, too."""
JOINS = 10
"""So many plans are left for joining what was found."""
BETTER = 0.999
Cuts = Mapping[str, int]
"""The dimension that is cut, by variable."""
Build = Callable[[Config], Plan]


class Priced(NamedTuple):
    """Cuts, and what a step takes with them."""

    cuts: Cuts
    found: Simulation


@dataclass
class MeshSearch:
    """What to cut on one mesh.

    Attributes:
        item: normalised.
        config: of the user, with the mesh.
        evaluator: simulates.
        build: makes the request of a configuration.
        limit: the bytes that a predicted peak may have; None: only time counts.
        path: what was the best, one after another; the first cuts nothing.
        tried: what was simulated.
        faults: why cuts could not be tried, where that is a fault of this package.
        left: how many plans may still be made.
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
        """Return what was the best, one after another, the best last; nothing where no plan can be made."""
        self._trained = frozenset(trained_variables(self.item))
        self.left = max(FEWEST, min(MOST, NODES // max(1, len(self.item.graph))))
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
            for cuts in joined[:-1]:  # the last one was needed
                self._offer({name: dim for name, dim in self.best.cuts.items() if name not in cuts})
        return self.path

    @property
    def best(self) -> Priced:
        """The best so far."""
        return self.path[-1]

    def _completed(self) -> list[Priced]:
        """Return the seeds that no earlier one has led to, each with what is read in blocks because of it."""
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
        """Return a seed with what follows from it; None where that is known, or there is no such plan."""
        cuts: dict[str, int] = seed.cuts
        for _ in range(COMPLETIONS):
            if any(cuts.items() <= one.items() for one in known):
                return None
            more = self._follows(cuts)
            if not more:
                return None if more is None else cuts
            if any(more.items() <= one.items() for one in known) and len(seed.dims) == 1:
                return None  # it leads where another one has led
            cuts |= more
        return cuts

    def _follows(self, cuts: Cuts) -> Cuts | None:
        """Return which other matrices the pass cuts, too, and of which others a reader takes blocks."""
        if self.left <= 0:
            return None
        self.left -= 1
        try:
            cut, edges = self.evaluator.cut(self.build(annotated(self.config, self.item, cuts)))
        except Exception as error:
            self._drop(cuts, error)
            return None
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

    # What a plan takes.

    @property
    def _devices(self) -> int:
        return self.config.model_size

    def _price(self, cuts: Cuts) -> Priced | None:
        if self.left <= 0:
            return None
        self.left -= 1
        try:
            plan = self.build(annotated(self.config, self.item, cuts))
            priced = Priced(cuts, self.evaluator.simulate_once(plan))
        except Exception as error:
            self._drop(cuts, error)
            return None
        self.tried.append(priced)
        return priced

    def _drop(self, cuts: Cuts, error: Exception) -> None:
        """Leave out cuts that nobody has asked for; what is no refusal is told, since it must not happen."""
        if not isinstance(error, RewriteError):
            self.faults.append(f"cuts of {', '.join(sorted(cuts))} were not tried: {type(error).__name__}: {error}")

    def _key(self, found: Simulation) -> tuple[int, float]:
        return max(0, found.peak_bytes - (self.limit or found.peak_bytes)), found.step_seconds

    def _helps(self, found: Simulation, base: Simulation) -> bool:
        return found.step_seconds < base.step_seconds or (self.limit is not None and found.peak_bytes < base.peak_bytes)

    def _is_better(self, found: Simulation, than: Simulation) -> bool:
        over, seconds = self._key(found)
        over_before, seconds_before = self._key(than)
        return over < BETTER * over_before or (over <= over_before and seconds < BETTER * seconds_before)


def annotated(config: Config, item: TrainingGraph, cuts: Cuts) -> Config:
    """Return a configuration with an entry of `sharding` for each group of variables that is cut alike.

    Args:
        config: with a model axis.
        item: whose variables they are.
        cuts: the dimension by variable.
    """
    return with_settings(config, sharding=(*config.sharding, *entries(cuts, item, config.model_size)))


def entries(cuts: Cuts, item: TrainingGraph, devices: int) -> list[Sharding]:
    """Return the entries of `sharding` that cut some variables and no others.

    Args:
        cuts: the dimension by variable.
        item: whose variables they are.
        devices: on the model axis.
    """
    import re

    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, dim in cuts.items():
        rank = len(item.variables[name].shape or ())
        found.setdefault((pattern_of(name), tuple(devices if i == dim else 1 for i in range(rank))), []).append(name)
    made: list[Sharding] = []
    for (pattern, split), names in found.items():
        meant = [name for name in item.variables if re.fullmatch(pattern, name)]
        matches = [pattern] if set(meant) == set(names) else [re.escape(name) for name in names]
        made += [Sharding(match=match, split=split) for match in matches]
    return made


def on_mesh(config: Config, data: int, model: int) -> Config:
    """Return a configuration with a mesh.

    Args:
        config: with as many devices.
        data: replicas.
        model: logical devices of each.
    """
    return with_settings(config, mesh=Mesh(data=data, model=model))
