"""Divide a step into stages: the nodes of each forward and backward part, and those that run once per step.

    folded step ──► F@0 = [...]  F@1 = [...]  B@1 = [...]  B@0 = [...]      for each micro-batch
                    before = reads, counts of masks                         once, before all of them
                    after  = norms, updates                                 once, from the summed gradients

The stages are those that the rewrite would choose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autograph_rewrite.cost.tasks.step import AnalyzedStep, OpCounts
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.control_flow import shared_frames_of
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import ancestors, grouped, topological_order
from autograph_rewrite.ir.variable_ops import variable_dependent_nodes
from autograph_rewrite.passes.pipeline_parallel.early_sends import Devices, are_apart
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.stages.assignment import assign_stages, stages_of_once

BEFORE, AFTER = "before", "after"
Part = tuple[str, int]
"""FORWARD, BACKWARD, BEFORE or AFTER, and a stage."""


@dataclass(frozen=True, repr=False)
class Staged:
    """One step in parts.

    Attributes:
        counts: the work and memory of its nodes.
        devices: the devices of one replica, which stages take cyclically, each as the number of the first device of the
            same name.
        parts: the nodes of each part, producers first.
        part_of: the part of each node.
        logical: the logical device of each stage whose memory is counted; None: all of them together.
    """

    folded: AnalyzedStep
    counts: Mapping[Node, OpCounts]
    stages: int
    devices: tuple[int, ...]
    parts: Mapping[Part, tuple[Node, ...]]
    part_of: Mapping[Node, Part]
    logical: int | None = None

    def counts_here(self, node: Node) -> bool:
        """Return whether a node's outputs are in the memory that is counted."""
        return self.logical is None or self.folded.logical.get(node, 0) == self.logical

    def device(self, part: Part) -> int:
        """Return the number of the device, within a replica, that runs a part."""
        return self.devices[part[1] % len(self.devices)]

    def rank(self, part: Part) -> int:
        """Return a number that orders the parts of one micro-batch in time."""
        kind, stage = part
        return {BEFORE: -1, FORWARD: stage, BACKWARD: 2 * self.stages - stage, AFTER: 2 * self.stages + 1}[kind]


def divided(folded: AnalyzedStep, plan: Plan, counts: Mapping[Node, OpCounts]) -> Staged:
    """Divide a folded step into stages.

    Raises:
        PlanError: the stages that the plan asks for are impossible on this graph, or no stages are possible.
    """
    state = folded.state
    assigned = assign_stages(plan, state, folded.outputs, {})
    if assigned is None or plan.pipeline is None:
        raise PlanError("this plan has no stages", hint="give it a pipeline")
    stage_of, stages = assigned
    early = _early(folded, counts)
    joined = _joined(folded, early)
    _refuse_meetings(folded, early, joined)
    of_once = stages_of_once(topological_order(state.graph), stage_of, stages.owners)
    part_of: dict[Node, Part] = {}
    for node in folded.order:
        if node.span != EACH:
            part_of[node] = (AFTER if node in joined else BEFORE, of_once[node])
        elif node in early:
            part_of[node] = (BEFORE, stage_of.get(node, 0))
        else:
            part_of[node] = (BACKWARD if node in stages.backward else FORWARD, stage_of.get(node, 0))
    parts = grouped((part, node) for node, part in part_of.items())
    every = plan.pipeline.devices
    names = every[: len(every) // plan.replicas]
    devices = tuple(names.index(name) for name in names)
    replicas = [every[first : first + len(names)] for first in range(0, len(every), len(names))]
    ordered = {part: tuple(_sent_first(own, part_of, replicas)) for part, own in parts.items()}
    return Staged(folded, counts, plan.pipeline.stages, devices, ordered, part_of)


def _sent_first(nodes: list[Node], part_of: Mapping[Node, Part], devices: Devices) -> list[Node]:
    """Return the nodes of a part in the order in which they run: those that other processes wait for run first."""

    def is_awaited(node: Node) -> bool:
        readers = [use.node for value in node.read_outputs for use in value.uses if use.node.span == EACH]
        return any(are_apart(part_of[node][1], part_of[one][1], devices) for one in readers if one in part_of)

    awaited = [node for node in nodes if node.span == EACH and is_awaited(node)]
    if not awaited:
        return nodes
    needed = ancestors(awaited, controls=False)
    return [node for node in nodes if node in needed] + [node for node in nodes if node not in needed]


def _joined(folded: AnalyzedStep, early: Collection[Node]) -> set[Node]:
    """Return the nodes that run once, after all micro-batches; nodes that only need sizes run before them."""
    found: set[Node] = set()
    for node in folded.order:
        if node.span == EACH:
            continue
        if not found.isdisjoint(node.controls):  # an optimizer reads a slot again after it has written it
            found.add(node)
            continue
        for value in node.inputs:
            made, placement = value.node.span == EACH, folded.state.source(value).placement
            differs = placement.is_split or placement.is_partial
            if value.node in found or (made and differs and value.node not in early):
                found.add(node)
    return found


def _refuse_meetings(folded: AnalyzedStep, early: Collection[Node], joined: Collection[Node]) -> None:
    """Refuse nodes at which all micro-batches would wait for each other, as the rewrite does.

    Raises:
        PlanError: the graph has such a node.
    """
    shared = shared_frames_of(folded.state.order)
    for node in folded.order:
        if node.span != EACH or node in early:
            continue
        if node in shared:
            raise PlanError(
                f"'{node.name}' is in a loop, which all micro-batches run together; a pipeline cannot wait for that",
                node=node,
                hint="unroll the loop",
            )
        if any(value.node in joined for value in node.inputs):
            problem = f"'{node.name}' needs a value of the whole batch, for which no stage of a pipeline can wait"
            raise PlanError(problem, node=node)


def _early(folded: AnalyzedStep, counts: Mapping[Node, OpCounts]) -> set[Node]:
    """Return the EACH nodes that run for all micro-batches first, because a value of the whole batch needs them."""
    state, learnt = folded.state, variable_dependent_nodes(folded.order)
    met = {
        value.node
        for node in folded.order
        for value, target in zip(node.inputs, counts[node].targets, strict=True)
        if target == "replicated" and value.node.span == EACH and value.node not in learnt
        if state.source(value).placement.kind != "local"  # a size is replaced by that of the whole batch
    }
    return {node for node in ancestors(met) if node.span == EACH}
