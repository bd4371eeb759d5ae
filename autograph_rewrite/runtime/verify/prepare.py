"""What is compared: an original without captures, its normal form with the same seeds, and the plan for one process.

item ──unbind──► original ──normalise──► flat ──request──► plan, all of its replicas in this process
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autograph_rewrite.compile import request, with_processes
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.function.lift_captures import unbind
from autograph_rewrite.runtime.verify.cluster import in_one_process
from autograph_rewrite.runtime.verify.fixed_seeds import pin, unseeded
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Prepared:
    """A comparison before anything is rewritten.

    Attributes:
        original: the item without captures, every random op seeded.
        flat: its normal form, with the same seeds.
        values: of captured variables, by name.
        given: the configuration, with its processes, or the plan.
        asked: the plan of the whole job.
        plan: the same for as many replicas in this process, one step in a run.
        notes: what to say about the seeds.
    """

    original: TrainingGraph
    flat: TrainingGraph
    values: Mapping[str, Any]
    given: Config | Plan
    asked: Plan
    plan: Plan
    notes: tuple[str, ...]


def prepare(item: TrainingGraph, config_or_plan: ConfigLike | Plan, seed: int) -> Prepared:
    """Return what is compared.

    Args:
        item: a training graph; it is not changed.
        config_or_plan: as for `rewrite`.
        seed: of random ops that have none.

    Raises:
        RewriteError: there is no plan for it.
    """
    single, values = unbind(item)
    flat = normalise_original(single)
    given = config_or_plan if isinstance(config_or_plan, Plan) else with_processes(Config.of(config_or_plan))
    asked = request(flat, given)
    plan = replace(in_one_process(asked), steps_per_run=0)
    original, notes = _with_seeds(single, flat, seed)
    return Prepared(original, flat, values, given, asked, plan, tuple(notes))


def _with_seeds(single: TrainingGraph, flat: TrainingGraph, seed: int) -> tuple[TrainingGraph, list[str]]:
    """Seed the random ops of `flat`, in place; return the original with the same seeds, and what to say about it."""
    hidden = set(unseeded(flat.graph)) - set(unseeded(single.graph))
    pinned = pin(flat.graph, seed)
    notes = []
    if pinned:
        ops = "1 random op without a seed was" if len(pinned) == 1 else f"{len(pinned)} random ops without a seed were"
        notes.append(f"{ops} given one in both graphs ('{pinned[0]}')")
    if hidden:
        notes.append("random ops stand in functions, so the original was run with its functions inlined")
        return flat, notes
    graph = single.graph.clone()
    pin(graph, seed)
    return replace(single, source=graph), notes
