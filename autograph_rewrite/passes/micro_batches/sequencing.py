"""Order micro-batches in time: one begins when the one before it on the same device has been accumulated.

    before   micro_0/x ──► ... ──► micro_0/dw ──┐          micro_1/x ──► ... ──► micro_1/dw     both at once
    after    micro_0/x ──► ... ──► micro_0/dw ──┴─► gate ─^─► micro_1/x ──► ...                 one after the other

Where all micro-batches meet in the middle of a step (statistics of the whole batch, a loop that they share), those
after it cannot begin before: there is one order on each side. The edges are found once, on the folded graph. A gate is
a placeholder with a default: whoever fetches a prediction alone feeds it, and is spared the gradients before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autograph_rewrite.analysis.barriers import barrier_depths, parameter_free_nodes, predecessors, successors
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import EXITS
from autograph_rewrite.passes.base.instance_order import (
    GATE,
    NO_ORDER,
    Gate,
    HappensAfter,
    InstanceOrder,
    is_running_sum,
)
from autograph_rewrite.passes.micro_batches.relax_waits import let_actors_wait, relax_waits

Cluster = TypeVar("Cluster", bound=Hashable)

FREE = frozenset(("Const", *EXITS))
"""What costs nothing, or belongs to a loop as far as waiting goes."""


def sequence_micro_batches(graph: Graph, micro: int) -> InstanceOrder:
    """Add the gates to a complete folded graph; return what waits for them.

    Args:
        micro: how many micro-batches each replica has.
    """
    if micro == 1:
        return NO_ORDER
    relax_waits(graph)
    order = let_actors_wait(graph, count_first=True)
    frames, unconditional, early = frames_of(order), unconditional_nodes(order), parameter_free_nodes(order)
    levels = barrier_depths(order, frames, early)
    members: dict[int, list[Node]] = {}
    for node in order:
        if node.span == EACH and node.op not in FREE and node not in frames and node not in early:
            members.setdefault(levels[node], []).append(node)
    gates = gates_of(graph, members, unconditional)
    meetings = tuple(nodes[0] for level, nodes in sorted(members.items()) if level)
    tasks = [[(level, m) for m in range(micro)] for level in members]
    return replace(in_order(members, gates, tasks, micro), meetings=meetings)


def gates_of(
    graph: Graph, clusters: Mapping[Cluster, Iterable[Node]], unconditional: Collection[Node]
) -> dict[Cluster, Gate]:
    """Add the gates of clusters.

    Args:
        graph: the folded graph.
        clusters: nodes that run one behind the other for one micro-batch.
        unconditional: the nodes that run in any case.
    """
    return {cluster: _gate(graph, nodes, unconditional) for cluster, nodes in clusters.items()}


def in_order(
    clusters: Mapping[Cluster, Collection[Node]],
    gates: Mapping[Cluster, Gate],
    devices: Iterable[Sequence[tuple[Cluster, int]]],
    micro: int,
) -> InstanceOrder:
    """Return what waits for the gates, so that each device runs its tasks one after the other.

    Args:
        clusters: nodes that run together for one micro-batch.
        gates: of the clusters: what waits for all that one computes.
        devices: of each, its tasks in their order: a cluster, and the number of the micro-batch.
        micro: how many micro-batches there are.
    """
    waits: dict[Cluster, list[HappensAfter | None]] = {cluster: [None] * micro for cluster in clusters}
    for tasks in devices:
        for (first, earlier), (then, later) in itertools.pairwise(tasks):
            waits[then][later] = HappensAfter(gates[first].passed, earlier)
    roots: dict[Node, tuple[HappensAfter | None, ...]] = {}
    for cluster, nodes in clusters.items():
        inside, own = set(nodes), tuple(waits[cluster])
        roots |= {node: own for node in nodes if not any(producer in inside for producer in predecessors(node))}
    return InstanceOrder(roots, {made.gate: made.sums for made in gates.values()})


def _gate(graph: Graph, nodes: Iterable[Node], unconditional: Collection[Node]) -> Gate:
    """Add the gate behind some nodes, and what passes it on.

    Args:
        graph: the folded graph.
        nodes: those that run for one micro-batch.
        unconditional: the nodes that run in any case: what is in a branch not taken would never open the gate.
    """
    inside = set(nodes)
    last = [node for node in inside if node in unconditional and not any(user in inside for user in successors(node))]
    last.sort(key=lambda node: node.name)
    running = {node: [user for user in successors(node) if is_running_sum(user)] for node in last}
    build = Builder(graph, GATE, span=EACH)
    default = Builder(graph, GATE).const(0, dtypes.FLOAT, "default")
    controls = [node for node in last if not running[node]]
    made = build.node("PlaceholderWithDefault", default, controls=controls, dtype=dtypes.FLOAT, shape=())
    # Feeding cuts off what a value depends on, but not those that wait for the node: they wait for a reader.
    # TensorFlow makes a NoOp of most readers without readers of their own, and then lets all wait for the node.
    passed = build.node("CheckNumerics", made.output(), what="passed", message="gate")
    return Gate(made, passed, tuple(dict.fromkeys(total for totals in running.values() for total in totals)))
