"""What is compared: an original without captures, its normal form with the same seeds, and the plan for one process.

item ──unbind──► original ──normalise──► flat ──request──► plan, all of its replicas in this process
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autograph_rewrite.compile import request, with_processes
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.function.lift_captures import unbind
from autograph_rewrite.runtime.verify.cluster import in_one_process
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


# Give every unseeded random op a seed of its own, so that two runs of one graph draw the same numbers.
#
# An op with `seed = seed2 = 0` asks for a fresh seed in every process. Datasets take their seeds as inputs.


_MAX_SEED = 2**31 - 1


def unseeded(graph: Graph) -> tuple[str, ...]:
    """Return the names of the random ops that draw something else in every run (functions are not looked into)."""
    return tuple(node.name for node in graph if _attrs_are_zero(node) or _inputs_are_zero(node))


def pin(graph: Graph, seed: int) -> tuple[str, ...]:
    """Seed the unseeded random ops of a graph in place, each by its name; return their names."""
    names = unseeded(graph)
    for name in names:
        node = graph.node(name)
        first, second = _seeds(name, seed)
        if _attrs_are_zero(node):
            node.set_attr("seed", first)
            node.set_attr("seed2", second)
        else:
            for index, value in zip(_seed_inputs(node), (first, second), strict=True):
                build = Builder(graph, f"{name}/seed", device=node.device)
                node.set_input(index, build.const(value, dtypes.INT64))
    return names


def _seeds(name: str, seed: int) -> tuple[int, int]:
    """Return two seeds above zero that depend on the op's name and on `seed` only."""
    first, second = (zlib.crc32(f"{seed}/{part}/{name}".encode()) % _MAX_SEED + 1 for part in (1, 2))
    return first, second


def _attrs_are_zero(node: Node) -> bool:
    op = find_op(node.op)
    if op is None or not {"seed", "seed2"} <= op.attrs.keys():
        return False
    return not node.attr("seed") and not node.attr("seed2")


def _seed_inputs(node: Node) -> tuple[int, ...]:
    """Return the positions of the inputs `seed` and `seed2`, of ops whose inputs are single tensors."""
    op = find_op(node.op)
    if op is None or any(arg.number_attr or arg.type_list_attr for arg in op.inputs):
        return ()
    return tuple(i for i, arg in enumerate(op.inputs) if arg.name in ("seed", "seed2"))


def _inputs_are_zero(node: Node) -> bool:
    positions = _seed_inputs(node)
    if len(positions) != 2:
        return False
    producers = [node.inputs[index].node for index in positions]
    return all(producer.op == "Const" and _is_zero(producer) for producer in producers)


def _is_zero(const: Node) -> bool:
    value = const.attr("value")
    return isinstance(value, np.ndarray) and value.size == 1 and not value.any()
