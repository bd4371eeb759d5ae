"""Roll the micro-batches of each replica into one loop: the graph does not grow with their number.

    before   %dw each ──► AddN(all)                           a copy of everything for each micro-batch
    after    total = 0;  loop m < M:  total += %dw            each: one copy, in a frame of its own
             %y each ──► ConcatV2(all)    ──►   list.push(%y) ... concatenated behind the loop

Values that are computed once enter the loop as constants. Constants that differ between micro-batches become a table.
The folded graph must be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.barriers import barrier_depths, late_nodes, needed_of_all, predecessors
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import is_there, shared_frames_of, unconditional_nodes
from autograph_rewrite.ir.copying import copy_node, select_first
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import (
    EACH,
    MICRO,
    ONCE,
    PER_REPLICA,
    REPLICA,
    Mesh,
    PerInstance,
    Select,
    is_rarer,
    prefix,
)
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.verify.loops import loop_faults
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, SWITCHES, has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.collectives.all_gather import RESTORES
from autograph_rewrite.passes.micro_batches.sequencing import let_actors_wait, relax_waits
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL, Loop
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD


def roll_micro_batches(graph: Graph, mesh: Mesh, slices: Mapping[Value, Value], roots: Iterable[Node]) -> None:
    """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

    Args:
        graph: the folded graph, complete.
        slices: by block, the value that it was cut out of.
        roots: nodes that callers need.

    Raises:
        PassError: something cannot be done in a loop; the message says what.
    """
    order, unconditional = order_of_bodies(graph, slices, list(roots))
    if not any(node.span == EACH for node in order):
        return
    all_of_it = Cluster(FORWARD, 0)
    loop = Loop(graph, [prefix(r) for r in range(mesh.size(REPLICA))], mesh.size(MICRO))
    LoopBodies(graph, {FORWARD: loop}).fill(order, unconditional, lambda _: all_of_it, mesh)
    require_closed(graph)


def require_closed(graph: Graph) -> None:
    """Refuse loops that wait for their own end: the step would end without values, and without an error.

    Raises:
        PassError: a loop does.
    """
    for node, problem in loop_faults(topological_order(graph)):
        raise PassError(problem, node=node, hint=UNROLL)


def order_of_bodies(
    graph: Graph, slices: Mapping[Value, Value], kept: Collection[Node]
) -> tuple[list[Node], set[Node]]:
    """Make iterations independent; return the nodes, producers first, and those that always run.

    Args:
        graph: the folded graph, complete.
        slices: by block, the value that it was cut out of.
        kept: nodes that callers need.

    Raises:
        PassError: an iteration needs a value of all micro-batches.
    """
    relax_waits(graph)
    _join_before_branches(graph)
    hoist_batch_counts(graph, slices)
    _take_own_sizes(graph, kept)
    eliminate_dead_code(graph, kept)
    order = let_actors_wait(graph, count_first=False)
    _refuse_what_meets(order)
    return order, unconditional_nodes(order)


def _join_before_branches(graph: Graph) -> None:
    """Let a node that reads all micro-batches in a branch, such as an assertion's message, read them before it.

    before   %x ──► Switch each ──► ConcatV2(all)             a loop cannot keep what is there only sometimes
    after    %x ──► ConcatV2(all) ──► Switch once
    """
    pending = [n for n in topological_order(graph) if has(n.op, "joins") and Select.ALL in n.selects.values()]
    while pending:
        node = pending.pop()
        value = node.inputs[0]
        switch = value.node
        if switch.op not in SWITCHES or switch.span != EACH or switch.inputs[1].node.span != ONCE:
            continue
        before = copy_node(graph, node, [switch.inputs[0], *node.inputs[1:]], name=f"{node.name}/before")
        before.set_inputs(before.inputs, node.selects)
        pending.append(before)
        inputs = [before.output(), switch.inputs[1]]
        branch = Builder(graph, f"{node.name}/branch", switch, span=node.span).node("Switch", *inputs)
        become(node, "Identity", [branch.output(value.index)], {"T": value.dtype})


def _take_own_sizes(graph: Graph, kept: Collection[Node]) -> None:
    """Let each iteration read a size of its micro-batch instead of the first one's, which is the same.

    before   %shape each ──► [1] of the first, once ──► each      the first comes out of the loop that needs it
    after    %shape each ──► [1] each ────────────────► each
    """
    order = topological_order(graph)
    needed = ancestors(node for node in order if node.span == EACH)
    known = {*kept, *(value.node for value in graph.anchors.values())}
    for node in order:
        if MICRO in node.span or node not in needed or node in known or not is_pure(node.op) or node.controls:
            continue
        read = [node.inputs[index] for index, select in node.selects.items() if select is Select.FIRST]
        if not read or len(read) < len(node.selects):
            continue
        if any(value.node.span != EACH or value.dtype not in (dtypes.INT32, dtypes.INT64) for value in read):
            continue
        node.set_span(EACH)
        node.set_inputs(node.inputs)
        for value in node.read_outputs:
            for reader in {use.node for use in value.uses if is_rarer(use.node.span, EACH)}:
                select_first(reader)


def _refuse_what_meets(order: list[Node]) -> None:
    """Refuse loops that all micro-batches share, and values of the whole batch that each micro-batch needs.

    Raises:
        PassError: there is one.
    """
    shared = shared_frames_of(order)
    levels = barrier_depths(order, ())
    for node in order:
        if node.span == EACH and node in shared:
            raise PassError(f"'{node.name}' is in a loop that all micro-batches run together", node=node, hint=UNROLL)
        if node.span == EACH and node.op != "Const" and levels[node]:
            problem = f"'{node.name}' {needed_of_all(node, levels)}, and runs in each iteration of a loop"
            raise PassError(problem, node=node, hint=UNROLL)


# Hoist counts over the batch (how many examples a mask keeps) out of the micro-batches that need them.
#
#     before   %block ──► Greater ──► Sum each ──► AddN(all) ──► each
#     after    %batch ──► Greater ──► Sum once ─────────────────► each
#
#     before   %block ──► f each ──► ConcatV2(all) ──► rows in their order ──► each        micro-batches interleaved
#     after    %batch ──► f once ────────────────────────────────────────────► each
#
#     before   %block ──► Shape each ──► [1] of the first ──► each
#     after    %batch ──► Shape once ──► [1] ───────────────► each
#
# A value that is the same in all blocks is the original's value for the whole batch. It needs no variable, so it has no
# gradient, and nothing is kept for one. It waits for no variable either: a value that does is computed after the loop.


def hoist_batch_counts(graph: Graph, slices: Mapping[Value, Value]) -> None:
    """Compute values that micro-batches need of all blocks from the whole batch instead.

    Args:
        slices: by block, the value that it was cut out of.

    Raises:
        PassError: such a value depends on the number of the block, or is computed in a loop.
    """
    order = topological_order(graph)
    late = late_nodes(order)
    made: dict[Value, Value] = {}
    _leave_in_order(order, late)
    needed = ancestors(node for node in order if node.span == EACH)
    for node in order:
        if node in late or node not in needed or not node.selects:
            continue
        if Select.ALL not in node.selects.values():
            for index in tuple(node.selects):
                node.set_input(index, _whole(graph, node.inputs[index], slices, made))
            select_first(node)
            continue
        if node.span == PER_REPLICA or node.inputs[0].node.span != EACH:
            continue  # a part of the whole; `_refuse_what_meets` names its readers in micro-batches
        if not has(node.op, "joins"):
            problem = f"{node.op} '{node.name}' reads all micro-batches before they begin"
            raise PassError(problem, node=node, hint=UNROLL)
        try:
            whole = _whole(graph, node.inputs[0], slices, made)
        except PassError:
            continue  # `_refuse_what_meets` names its readers in micro-batches
        if node.op == "Pack":  # it stacks the parts, and there is one
            whole = Builder.at(node).op("Pack", whole, what="whole", N=1, axis=0)
        _stand_for(node, whole)


def _leave_in_order(order: Sequence[Node], late: Collection[Node]) -> None:
    """Drop nodes that restore an order of rows that hoisted values never lose."""
    needed = ancestors(node for node in order if node.span == EACH)
    for node in order:
        if RESTORES in node.attrs and node in needed and node not in late:
            _stand_for(node, node.inputs[0])


def _stand_for(node: Node, value: Value) -> None:
    """Let readers and waiters of a node that joins all parts use a value of the whole batch."""
    node.output().replace_all_uses_with(value)
    for user in node.control_users:
        user.remove_control(node)
        user.add_control(value.node)


def _whole(graph: Graph, value: Value, slices: Mapping[Value, Value], made: dict[Value, Value]) -> Value:
    """Return a value of the whole batch."""
    if value in slices:
        return slices[value]
    if value.node.span != EACH:
        return value
    if value not in made:
        node = value.node
        if node.op in BACK_EDGES:
            raise PassError(f"'{node.name}' is in a loop of its own", node=node, hint=UNROLL)
        if any(isinstance(raw, PerInstance) for raw in node.attrs.values()):
            problem = f"'{node.name}' differs between micro-batches, and all of them need it before they begin"
            raise PassError(problem, node=node, hint=UNROLL)
        inputs = [_whole(graph, one, slices, made) for one in node.inputs]
        controls = [control for control in node.controls if control.span != EACH]
        copy = copy_node(graph, node, inputs, name=f"{node.name}/whole", controls=controls)
        copy.set_span(ONCE)
        select_first(copy)
        made |= {other: copy.output(other.index) for other in node.read_outputs}
    return made[value]


# Move clusters of nodes into the bodies of loops, each of which works on one micro-batch in an iteration.
#
#     micro-batches     one loop, one cluster, which runs in every iteration
#     a pipeline        a forward and a backward loop; a cluster for each stage, which runs when the loop's
#                       table of turns has a micro-batch for it
#
# A cluster reads values of other clusters through slots that the loop carries, or from a list that the forward loop
# keeps for the backward loop. Values that are computed once enter a loop as constants. Constants that differ between
# micro-batches are looked up in a table.


Turns = Sequence[Sequence[int | None]]
"""By stage, its micro-batch in each iteration, if any."""


class Cluster(NamedTuple):
    """Nodes that run together for one micro-batch: a forward or a backward part of the body."""

    kind: str
    part: int


class _Gate(NamedTuple):
    """The micro-batch of a cluster, or -1; whether the cluster runs; the micro-batch again, dead if it does not."""

    turn: Value
    runs: Value
    micro: Value


class LoopBodies:
    """Loops, and which of their clusters each node is in.

    Args:
        loops: by the kind of their clusters.
        turns: of each kind; none if all clusters run in every iteration.

    Attributes:
        of: the cluster of each node in a loop.
    """

    def __init__(self, graph: Graph, loops: Mapping[str, Loop], turns: Mapping[str, Turns] | None = None) -> None:
        self.of: dict[Node, Cluster] = {}
        self._graph = graph
        self._loops = loops
        self._turns = turns or {}
        self._gates: dict[Cluster, _Gate] = {}
        self._items: dict[tuple[Value, Cluster], Value] = {}

    def fill(
        self, order: Sequence[Node], unconditional: set[Node], cluster_of: Callable[[Node], Cluster], mesh: Mesh
    ) -> None:
        """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

        Args:
            order: the nodes, producers first.
            unconditional: nodes that run in every step.

        Raises:
            PassError: something cannot be done in a loop; the message says what.
        """
        for node in order:
            if node.span != EACH:
                continue
            if _is_plain_constant(node) and node in unconditional:
                for control in node.controls:  # without them it stays outside, and its readers there wait for no loop
                    node.remove_control(control)
            else:
                self.of[node] = cluster_of(node)
        for node in [node for node in self.of if node.op == "Const" and not _is_plain_constant(node)]:
            self._look_up(node, mesh, unconditional)
        for node in [node for node in order if node in self.of]:
            _keep_one_of_each_replica(node, mesh)
            self._move_in(node, unconditional)
        for node in order:
            if node.span != EACH and node.name in self._graph.nodes:
                self._read_behind(node, unconditional, mesh.size(REPLICA))

    def _look_up(self, node: Node, mesh: Mesh, unconditional: set[Node]) -> None:
        """Replace a constant that differs between micro-batches by entries of a table, one in each cluster.

        Raises:
            PassError: it is in a branch.
        """
        _require_certain(node, node, node in unconditional)
        table, own = _table_of(node, mesh), self.of.pop(node)
        entries: dict[Cluster, Value] = {}
        for reader, index in node.output().uses:
            cluster = self.of.get(reader, own)
            if cluster not in entries:
                with self._at(cluster) as loop:
                    gate = self._gate(cluster)
                    entries[cluster] = loop.entry(table, node.name, gate.micro if gate is not None else None)
                self.of[entries[cluster].node] = cluster
            reader.set_input(index, entries[cluster], reader.selects.get(index))
        for user in node.control_users:
            user.remove_control(node)
        for control in node.controls:
            node.remove_control(control)
        self._graph.erase(node)

    def _move_in(self, node: Node, unconditional: set[Node]) -> None:
        """Let a node read the values of other clusters and of nodes outside, and run only if it has a micro-batch.

        Raises:
            PassError: a value that it reads is in a branch, or is computed only later.
        """
        cluster = self.of[node]
        for index, value in enumerate(node.inputs):
            if self.of.get(value.node) != cluster:
                _require_certain(node, value.node, is_there(value, unconditional))
                node.set_input(index, self._brought(node, value, cluster))
        for control in node.controls:
            if self.of.get(control) != cluster:
                _require_certain(node, control, control in unconditional)
                node.remove_control(control)
                self._wait(node, control, cluster)
        gate = self._gate(cluster)
        begins = not any(producer in self.of for producer in predecessors(node))
        if gate is not None and begins:
            node.add_control(gate.micro.node)
        elif begins and (node.op in ENTERS or not predecessors(node)):
            # Without this edge, a loop in the body begins again after the last iteration, as the outer loop's
            # constants arrive once more; a step with a part of the body on another device would hang.
            node.add_control(self._loops[cluster.kind].number.node)

    def _brought(self, node: Node, value: Value, cluster: Cluster) -> Value:
        source = self.of.get(value.node)
        if source is None:
            with self._at(cluster) as loop:
                return loop.constant(value)
        if source.kind == FORWARD and cluster.kind == BACKWARD:
            return self._remembered(value, source, cluster)
        distance = self._distance(node, value.node, source, cluster)
        with self._at(source) as loop:
            return loop.later(value, distance, 1 if cluster.kind == FORWARD else -1)

    def _remembered(self, value: Value, source: Cluster, cluster: Cluster) -> Value:
        """Return the value that the forward loop has kept for the micro-batch of a backward cluster."""
        if (value, cluster) not in self._items:
            with self._at(source) as loop:
                kept = loop.kept(value)
            gate, behind = self._gate(cluster), self._loops[BACKWARD]
            assert gate is not None
            with behind.at(source.part):
                self._items[value, cluster] = behind.item(kept, value, gate.micro)
        return self._items[value, cluster]

    def _wait(self, node: Node, control: Node, cluster: Cluster) -> None:
        """Replace a control edge from outside of the cluster by a wait that a loop can have."""
        source = self.of.get(control)
        if source is None:
            self._loops[cluster.kind].wait_for(control)
        elif source.kind == FORWARD and cluster.kind == BACKWARD:
            with self._at(source) as loop:
                self._loops[BACKWARD].wait_for(loop.ran(control))
        elif self._distance(node, control, source, cluster) and not is_pure(control.op):
            problem = f"'{node.name}' waits for '{control.name}', which is in another stage"
            raise PassError(problem, node=node, hint=UNROLL)

    def _distance(self, node: Node, producer: Node, source: Cluster, cluster: Cluster) -> int:
        distance = cluster.part - source.part if cluster.kind == FORWARD else source.part - cluster.part
        if source.kind != cluster.kind or distance < 1:
            raise PassError(
                f"an edge leads back: '{node.name}' is in stage {cluster.part} and needs '{producer.name}' "
                f"of stage {source.part}, which is there only later",
                node=node,
                hint=UNROLL,
            )
        return distance

    def _gate(self, cluster: Cluster) -> _Gate | None:
        """Return when a cluster runs, from its row of the table of turns; None if it runs in every iteration."""
        if cluster.kind not in self._turns:
            return None
        if cluster not in self._gates:
            loop = self._loops[cluster.kind]
            name = f"{loop.axis}_{cluster.part}"
            row = [-1 if m is None else m for m in self._turns[cluster.kind][cluster.part]]
            turn = Builder(self._graph, f"{loop.scope}/{name}").const(row, dtypes.INT32, "turns")
            with loop.at(cluster.part):
                self._gates[cluster] = _Gate(*loop.turn(turn, name))
        return self._gates[cluster]

    @contextmanager
    def _at(self, cluster: Cluster) -> Iterator[Loop]:
        """Add nodes for a cluster."""
        loop, gate = self._loops[cluster.kind], self._gate(cluster)
        with loop.at(cluster.part, *((gate.runs, gate.turn) if gate is not None else ())):
            yield loop

    # Results of the loops, which readers outside read instead of the values of all micro-batches.
    #
    #     before   AddN(all(%dw))           ConcatV2(all(%y), 0)          Identity(first(%lr))
    #     after    the sum that the loop    its list, joined behind it    its value of the first micro-batch
    #              has carried
    #
    # Nodes that waited for nodes of a loop wait until these have run for all micro-batches.

    def _read_behind(self, node: Node, unconditional: Container[Node], replicas: int) -> None:
        """Let a node outside of loops read their results.

        Args:
            node: runs once, or once on each replica.
            unconditional: the nodes that run in every step.
            replicas: number of loops of each kind.

        Raises:
            PassError: a loop cannot join all micro-batches as the node does, or a value that it reads is in a branch.
        """
        build, inside = Builder.at(node), self.of
        needed = [(value.node, is_there(value, unconditional)) for value in node.inputs]
        for producer, is_certain in [*needed, *((control, control in unconditional) for control in node.controls)]:
            if producer in inside and not is_certain:
                problem = f"'{node.name}' needs '{producer.name}', which may not be there"
                raise PassError(problem, node=node, hint=UNROLL)
        for control in [control for control in node.controls if control in inside]:
            node.remove_control(control)
            with self._at(inside[control]) as loop:
                node.add_control(loop.ran(control) if self._turns else loop.finished(control))
        if not any(value.node in inside for value in node.inputs):
            return
        if Select.ALL not in node.selects.values():
            for index, value in enumerate(node.inputs):
                if value.node in inside:
                    with self._at(inside[value.node]) as loop:
                        node.set_input(index, loop.first(value), Select.FIRST)
            return
        made, join = _joined(node)
        with self._at(inside[node.inputs[0].node]) as loop:
            joined = made(loop, node.inputs[0])
        if node.span == PER_REPLICA or replicas == 1:
            new = Builder.at(node, span=node.span).node("Identity", joined, what="looped", selects={0: Select.FIRST})
        else:
            axis = [Builder(self._graph, node.name).const(0, dtypes.INT32, "axis")] if join == "ConcatV2" else []
            new = build.node(join, joined, *axis, what="looped", selects={0: Select.ALL}, N=replicas)
        for control in node.controls:
            new.add_control(control)
        self._graph.replace(node, new)


def _is_plain_constant(node: Node) -> bool:
    """Return whether a node is a constant that is the same for all micro-batches."""
    return node.op == "Const" and not any(isinstance(raw, PerInstance) for raw in node.attrs.values())


def _keep_one_of_each_replica(node: Node, mesh: Mesh) -> None:
    """Let attributes that differ between instances differ between replicas only.

    Raises:
        PassError: one differs between iterations.
    """
    for key, raw in list(node.attrs.items()):
        if isinstance(raw, PerInstance):
            micro = mesh.size(MICRO)
            parts = [raw.raws[first : first + micro] for first in range(0, len(raw.raws), micro)]
            if any(len(set(part)) > 1 for part in parts):
                raise PassError(f"'{key}' of '{node.name}' differs between micro-batches", node=node, hint=UNROLL)
            own = tuple(part[0] for part in parts)
            node.set_raw_attr(key, PerInstance(own) if len(own) > 1 else own[0])


def _require_certain(node: Node, producer: Node, is_certain: bool) -> None:
    """Refuse a value of a branch that enters a loop from outside: the loop would wait for it, or end with it.

    Raises:
        PassError: the producer is in a branch.
    """
    if not is_certain:
        problem = f"'{node.name}' is in a branch or a loop, and needs '{producer.name}' of it from outside of the loop"
        raise PassError(problem, node=node, hint=UNROLL)


def _table_of(node: Node, mesh: Mesh) -> Value:
    """Return a table [micro, ...] for each replica, of a constant that differs between micro-batches."""
    raw = node.attrs["value"]
    assert isinstance(raw, PerInstance)
    arrays = [np.asarray(decode(one)) for one in raw.raws]
    tables = [np.stack(arrays[r * mesh.size(MICRO) : (r + 1) * mesh.size(MICRO)]) for r in range(mesh.size(REPLICA))]
    own = PerInstance(tuple(encode("tensor", one) for one in tables)) if mesh.size(REPLICA) > 1 else tables[0]
    return Builder.at(node, span=EACH).op("Const", what="table", dtype=node.output_dtypes[0], value=own)


def _joined(node: Node) -> tuple[Callable[[Loop, Value], Value], str]:
    """Return the method of a loop that joins a value as a node does, and the op that joins the replicas."""
    if node.op == "AddN":
        return Loop.total, "AddN"
    if node.op == "Pack" and not node.attr("axis", 0):
        return Loop.stacked, "ConcatV2"
    if node.op == "ConcatV2":
        if axis := node.inputs[1].node.attr("value") if node.inputs[1].node.op == "Const" else 1:
            problem = f"'{node.inputs[0].name}' is joined along dimension {axis}"
            raise PassError(problem, node=node, hint=UNROLL)
        return Loop.joined, "ConcatV2"
    raise PassError(f"{node.op} '{node.name}' reads all micro-batches", node=node, hint=UNROLL)
