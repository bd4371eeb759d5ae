"""Order micro-batches in time: a micro-batch begins when the one before it on its device has been accumulated.

    before   micro_0/x ──► ... ──► micro_0/dw ──┐          micro_1/x ──► ... ──► micro_1/dw     both at once
    after    micro_0/x ──► ... ──► micro_0/dw ──┴─► gate ─^─► micro_1/x ──► ...                 one after the other

At a barrier in a step (statistics of the whole batch, a shared loop) all micro-batches meet, so there is one order
before it and one after it. The edges are found once, on the folded graph. A gate is a placeholder with a default: a
fetch of a prediction alone feeds the gate, and so does not run the gradients before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autograph_rewrite.analysis.barriers import barrier_depths, parameter_free_nodes, predecessors, successors
from autograph_rewrite.analysis.variable_uses import completions
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of, is_inside, shared_frames_of, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import descendants, grouped, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.variable_ops import handle_node, is_handle, is_update
from autograph_rewrite.ops.traits import EXITS, READS
from autograph_rewrite.passes.base.instance_order import (
    GATE,
    NO_ORDER,
    Gate,
    HappensAfter,
    InstanceOrder,
    is_running_sum,
)

Cluster = TypeVar("Cluster", bound=Hashable)


def sequence_micro_batches(graph: Graph, micro: int) -> InstanceOrder:
    """Add the gates to a complete folded graph; return which nodes wait for them."""
    if micro == 1:
        return NO_ORDER
    relax_waits(graph)
    order = let_actors_wait(graph, count_first=True)
    shared, unconditional, early = shared_frames_of(order), unconditional_nodes(order), parameter_free_nodes(order)
    levels = barrier_depths(order, early)
    members = grouped((levels[node], node) for node in runs_of(order) if node not in shared and node not in early)
    gates = gates_of(graph, members, unconditional)
    meetings = tuple(nodes[0] for level, nodes in sorted(members.items()) if level)
    tasks = [[(level, m) for m in range(micro)] for level in members]
    return replace(in_order(order, members, gates, tasks, micro), meetings=meetings)


def runs_of(order: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes that each micro-batch runs, without those that cost nothing."""
    frames, shared = frames_of(order), shared_frames_of(order)
    for node in order:
        if node.span != EACH or node.op == "Const":
            continue
        if node.op not in EXITS or (node.inputs[0].node in frames and node.inputs[0].node not in shared):
            yield node


def gates_of(
    graph: Graph, clusters: Mapping[Cluster, Iterable[Node]], unconditional: Collection[Node]
) -> dict[Cluster, Gate]:
    """Add the gates of clusters.

    Args:
        clusters: nodes that run together for one micro-batch.
        unconditional: the nodes that run in every step.
    """
    return {cluster: _gate(graph, nodes, unconditional) for cluster, nodes in clusters.items()}


def in_order(
    order: Sequence[Node],
    clusters: Mapping[Cluster, Collection[Node]],
    gates: Mapping[Cluster, Gate],
    devices: Iterable[Sequence[tuple[Cluster, int]]],
    micro: int,
) -> InstanceOrder:
    """Return which nodes wait for the gates, so that each device runs its tasks one after the other.

    Args:
        order: all nodes, producers first; nodes in a loop wait only through the values that enter it.
        clusters: nodes that run together for one micro-batch.
        gates: one for each cluster.
        devices: for each, its tasks in their order: a cluster, and the number of the micro-batch.
    """
    waits: dict[Cluster, list[HappensAfter | None]] = {cluster: [None] * micro for cluster in clusters}
    for tasks in devices:
        for (first, earlier), (then, later) in itertools.pairwise(tasks):
            waits[then][later] = HappensAfter(gates[first].passed, earlier)
    roots: dict[Node, tuple[HappensAfter | None, ...]] = {}
    frames = frames_of(order)
    for cluster, nodes in clusters.items():
        inside, own = set(nodes), tuple(waits[cluster])
        begin = (node for node in nodes if not is_inside(node, frames))
        roots |= {node: own for node in begin if not any(producer in inside for producer in predecessors(node))}
    return InstanceOrder(roots, {made.gate: made.sums for made in gates.values()})


def _gate(graph: Graph, nodes: Iterable[Node], unconditional: Collection[Node]) -> Gate:
    """Add the gate after some nodes, and the node that passes it on.

    Args:
        nodes: those that run for one micro-batch.
        unconditional: the nodes that run in every step: a node in a branch not taken would never open the gate.
    """
    inside = set(nodes)
    last = [node for node in inside if node in unconditional and not any(user in inside for user in successors(node))]
    last.sort(key=lambda node: node.name)
    running = {node: [user for user in successors(node) if is_running_sum(user)] for node in last}
    build = Builder(graph, GATE, span=EACH)
    default = Builder(graph, GATE).const(0, dtypes.FLOAT, "default")
    controls = [node for node in last if not running[node]]
    made = build.node("PlaceholderWithDefault", default, controls=controls, dtype=dtypes.FLOAT, shape=())
    # A feed cuts the data edges of the gate, but not its control edges: so other nodes wait for a reader of its value.
    # TensorFlow turns most readers that nothing reads into a NoOp, and lets all wait for the gate itself.
    passed = build.node("CheckNumerics", made.output(), what="passed", message="gate")
    return Gate(made, passed, tuple(dict.fromkeys(total for totals in running.values() for total in totals)))


# Remove waits for all micro-batches that nothing needs: pure ops may run before the nodes of their control edges.
#
# before   count += n  ─^─► %dloss ─► %dw ─► AddN(all) ─► w -= dw       %dloss waits for all losses
# after    %dloss ─► %dw ─► AddN(all) ─► w -= dw  ◄─^─ count += n       what acts waits instead
#
# before   AddN(all(%loss)) ◄─^─ w -= dw                                its running sum waits, and what waits for that
# after    AddN(all(%loss)) ─► Identity ◄─^─ w -= dw
#
# before   2 once ◄─^─ %dy,  %dx = 2 %y %dy                             the 2 waits for all of %dy, behind an assertion
# after    2 once,  %dx = 2 %y %dy ◄─^─ %dy                             who reads it waits for its own


def relax_waits(graph: Graph) -> None:
    """Remove control edges between values that need no order.

    TensorFlow's gradients let some values wait for others that they do not read. A function's outputs wait for its
    updates: the nodes that join their parts from micro-batches wait instead. Waits for nodes that depend on an effect
    stay (the end of a branch depends on its updates), and so does the order of reads and updates of a variable.

    Args:
        graph: the folded graph, complete.
    """
    nodes = topological_order(graph)
    unconditional = unconditional_nodes(nodes)
    acted = descendants(node for node in nodes if _acts(node))
    pairs = accesses_in_order(nodes, unconditional)
    for node in nodes:
        if node not in unconditional:
            continue
        if node.span != EACH and is_pure(node.op) and (node.op != "NoOp" or node.control_users):
            members = {value.node for value in node.inputs}  # whose collectives would wait for the other replicas
            for control in [one for one in node.controls if one in unconditional and one not in members]:
                if is_pure(control.op) and control.op != "NoOp" and control not in acted:
                    node.remove_control(control)
            _let_instances_wait(node, unconditional)
        elif node.op == "Identity" and node.span == EACH:
            _wait_later(node)
    keep_order(graph, pairs)


def _acts(node: Node) -> bool:
    """Return whether a node writes a variable, or runs for its effect alone."""
    return is_update(node) or not (is_pure(node.op) or node.read_outputs)


def _wait_later(node: Node) -> None:
    """Move the waits of a value to its readers, if all of them run once."""
    readers = [use.node for use in node.output().uses]
    if readers and all(reader.span != EACH for reader in (*readers, *node.control_users)):
        for control in [control for control in node.controls if control.span != EACH]:
            node.remove_control(control)
            for reader in readers:
                reader.add_control(control)


def _let_instances_wait(node: Node, unconditional: Collection[Node]) -> None:
    """Move the waits of a node that runs once to its readers, if each instance of a reader can wait for its own."""
    users = successors(node)
    if not users or any(user.span != EACH or user not in unconditional for user in users):
        return
    for control in [one for one in node.controls if one.span == EACH and one in unconditional]:
        node.remove_control(control)
        for user in dict.fromkeys(users):
            user.add_control(control)


def let_actors_wait(graph: Graph, *, count_first: bool) -> list[Node]:
    """If a micro-batch's value waits for a result of all micro-batches, let the nodes that act on it wait instead.

    Args:
        graph: the folded graph, complete.
        count_first: whether values that need no variable are computed for all micro-batches before the first begins.

    Returns:
        The nodes of the edited graph, producers first.
    """
    order = topological_order(graph)
    unconditional = unconditional_nodes(order)
    levels = barrier_depths(order, parameter_free_nodes(order) if count_first else ())
    held = {value.node for value in graph.anchors.values()}
    for node in order:
        if node not in unconditional or node in held or not _only_passes_on(node):
            continue
        late = [one for one in node.controls if one.span != EACH and one in unconditional and levels[one]]
        for actor in _actors(node, unconditional, held) if late else ():
            for control in late:
                actor.add_control(control)
                node.remove_control(control)
    relax_waits(graph)  # nodes that waited for an effect through those values no longer do
    for node in order:
        if is_running_sum(node) and node.controls:
            _wait_behind(graph, node)
    return topological_order(graph)


def _only_passes_on(node: Node) -> bool:
    return is_pure(node.op) and (bool(node.read_outputs) or node.op == "NoOp")


def _actors(start: Node, unconditional: Collection[Node], held: Collection[Node]) -> list[Node]:
    """Return the nodes after `start` that act once for all micro-batches; none if a micro-batch acts, or none waits."""
    found: dict[Node, None] = {}
    seen, pending, each = {start}, [start], start.span == EACH
    while pending:
        node = pending.pop()
        for user in successors(node):
            if user in seen:
                continue
            seen.add(user)
            passes_on = user in unconditional and _only_passes_on(user)
            if user.span == EACH:
                if not passes_on:
                    return []
                each = True
                pending.append(user)
            elif passes_on and user not in held and successors(user):
                pending.append(user)  # may lead to micro-batches, or to a node that acts
            else:
                found[user] = None
    return list(found) if each else []


def _wait_behind(graph: Graph, total: Node) -> None:
    """Move the waits of a running sum to its readers, as the next micro-batch waits for the sum."""
    controls = list(total.controls)
    name, inputs = f"{total.name}/behind", [total.output()]
    behind = Builder(graph, name, total, span=total.span).node("Identity", *inputs, controls=controls)
    total.output().replace_all_uses_with(behind.output(), keep={behind})
    for user in total.control_users:
        user.add_control(behind)
    for control in controls:
        total.remove_control(control)


# Preserve the order of variable accesses while `relax_waits` removes control edges.
#
# before   read(w) ─► %y ─► %dy ─^─► 0.9 ─► w -= 0.9 w      the constant waits for a gradient, which needs the read
# after    read(w) ─^─► w -= 0.9 w                          nothing waits for %dy, and the update is behind as before
#
# A read in a loop or a branch is complete when all values are there that leave it and depend on the read.


Pair = tuple[Node, Node]
"""The node that completes an earlier access of a variable, and a later access; one of the two accesses updates it."""


def accesses_in_order(order: Sequence[Node], unconditional: Collection[Node]) -> list[Pair]:
    """Return the pairs of accesses of a variable whose order the graph determines.

    Args:
        order: the nodes, producers first.
        unconditional: those that run in every step.
    """
    accesses = [node for node in order if node.op in READS or is_update(node)]
    handles = {node: dict.fromkeys(map(handle_node, filter(is_handle, node.inputs))) for node in accesses}
    of = grouped((handle, node) for node in accesses for handle in handles[node])
    groups = [nodes for nodes in of.values() if any(map(is_update, nodes))]
    ends = completions(order, unconditional, dict.fromkeys(node for nodes in groups for node in nodes))
    pairs = [
        (end, later)
        for nodes in groups
        for later in nodes
        for earlier in nodes
        if earlier is not later and later in unconditional and (is_update(earlier) or is_update(later))
        for end in ends[earlier]
    ]
    return _in_order(order, pairs)


def keep_order(graph: Graph, pairs: Sequence[Pair]) -> None:
    """Let the later access of each pair wait for the earlier one, if it no longer does."""
    kept = set(_in_order(topological_order(graph), pairs))
    for pair in pairs:
        if pair not in kept:
            pair[1].add_control(pair[0])


def _in_order(order: Sequence[Node], pairs: Sequence[Pair]) -> list[Pair]:
    marks = {node: 1 << i for i, node in enumerate(dict.fromkeys(one for one, _ in pairs))}
    before = marks_before(order, marks)
    return [(one, other) for one, other in pairs if before[other] & marks[one]]
