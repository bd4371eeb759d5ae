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

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Mesh, Sharding
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.ir.variable_ops import handle_uses
from autograph_rewrite.load.sharding_marks import mark_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import trained_variables
from autograph_rewrite.strategies.builder import TrainedVariable
from autograph_rewrite.strategies.candidates import with_settings
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


# Seeds: the variables that a model axis may cut, those of repeated layers together, each along every dimension.
#
#     layer_0/query/w [128, 128], layer_1/query/w [128, 128]     one group, seeds (1) and (0)
#     dense/kernel [64, 64], dense_1/kernel, dense_2/kernel      and in turn: (1) (0) (1), (0) (1) (0)
#     conv/kernel [3, 3, 16, 64]                                 seeds (3) and (2): channels
#
# Layers that repeat have names that differ in numbers. Grouping them is what alpa (Zheng et al., 2022) does by
# clustering layers and Unity (Unger et al., 2022) by substitutions that apply everywhere. A dimension counts if the
# devices divide it.

_NUMBERS, _NUMBERED = re.compile(r"\d+"), re.compile(r"_?\d+")
_CONVOLUTION = re.compile(r".*Conv\d?D.*")


class Seed(NamedTuple):
    """Variables to cut along one dimension.

    Attributes:
        names: of variables that are alike.
        dims: that are cut, in turn.
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
    """Yield what may be cut into so many blocks, the largest group first; what is cut in turn comes last.

    Args:
        item: normalised.
        devices: on the model axis.
    """
    groups: dict[object, list[TrainedVariable]] = {}
    for name, one in trained_variables(item).items():
        if len(one.shape) > 1 and not one.obstacle:
            groups.setdefault((_NUMBERED.sub("", name), one.shape, one.variable.dtype), []).append(one)
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
        shape: of a variable.
        dim: that is cut.
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


# Annotations for a configuration: which meshes its devices can be, and what to cut on each.
#
#     4 devices     2 x 2: searched     1 x 4: what was found for 2, as far as 4 devices divide it
#
# A mesh or a `sharding` that the user has written stays as it is.

KEPT = 4
"""So many of what was the best, one after another, are tried on other meshes, and with recomputation."""


def wants_annotations(item: TrainingGraph, config: Config) -> bool:
    """Return whether there is a model axis, and nobody has said what to cut on it."""
    is_open = config.model_size > 1 and config.mesh is not None and len(config.mesh.model_axes) == 1
    return is_open and not config.sharding and not any(mark_of(name) for name in item.graph.nodes)


def meshes_of(item: TrainingGraph, config: Config) -> list[Config]:
    """Return the configurations of meshes with a model axis, the smallest first; none where the user rules it out."""
    if config.mesh is not None:
        return [config] if wants_annotations(item, config) else []
    devices, count = config.devices or (), len(config.devices or ())
    alone = config.cluster is None and config.workers == 1 and len(set(devices)) == count
    is_open = alone and config.pipeline is None and not config.sharding
    if not is_open or any(mark_of(name) for name in item.graph.nodes):
        return []
    return [on_mesh(config, count // model, model) for model in range(2, count + 1) if count % model == 0]


def annotated_configs(search: MeshSearch, others: list[Config]) -> Iterator[Config]:
    """Yield configurations with annotations: of the searched mesh what was the best, then the same on others.

    Args:
        search: of the first mesh.
        others: the other meshes.
    """
    found = [one.cuts for one in search.run() if one.cuts][-KEPT:]
    for cuts in found:
        yield annotated(search.config, search.item, cuts)
    for config in others:
        for cuts in found:
            if _fits(search.item, cuts, config.model_size):
                yield annotated(config, search.item, cuts)


def _fits(item: TrainingGraph, cuts: Cuts, devices: int) -> bool:
    return all(can_be_cut(item.variables[name].shape or (), dim, devices) for name, dim in cuts.items())
