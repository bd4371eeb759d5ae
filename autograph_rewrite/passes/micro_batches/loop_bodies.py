"""Move clusters of nodes into the bodies of loops, each of which works on one micro-batch in an iteration.

    micro-batches     one loop, one cluster, which runs in every iteration
    a pipeline        a forward and a backward loop; a cluster for each stage, which runs when the loop's table of turns
                      has a micro-batch for it

A cluster reads what other clusters make through slots that the loop carries, or out of a list that the forward loop has
kept for the backward one. What runs once enters a loop as a constant. What differs between micro-batches is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.barriers import predecessors
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import is_there
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, MICRO, ONCE, PER_REPLICA, REPLICA, Mesh, PerInstance, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL, Loop
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD

Turns = Sequence[Sequence[int | None]]
"""By stage, the micro-batch that it works on in each iteration, if any."""


class Cluster(NamedTuple):
    """Nodes that run one behind the other for one micro-batch: a forward or a backward part of the body."""

    kind: str
    part: int


class _Gate(NamedTuple):
    """On which micro-batch a cluster works, or -1; whether it runs; the first again, there only where it runs."""

    turn: Value
    runs: Value
    micro: Value


class LoopBodies:
    """Loops, and which of their clusters each node is in.

    Args:
        graph: the folded graph.
        loops: by the kind of their clusters.
        turns: of each kind; none where all clusters run in every iteration.

    Attributes:
        of: the clusters of the nodes in loops.
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
            cluster_of: says where a node belongs.
            mesh: of this process.

        Raises:
            PassError: something cannot be done in a loop; the message says what.
        """
        for node in order:
            if node.span != EACH:
                continue
            if _is_plain_constant(node) and node in unconditional:
                for control in node.controls:  # it may be had before, and then nothing outside waits for a loop
                    node.remove_control(control)
            else:
                self.of[node] = cluster_of(node)
        for node in [node for node in self.of if node.op == "Const" and not _is_plain_constant(node)]:
            self._look_up(node, mesh, unconditional)
        for node in [node for node in order if node in self.of]:
            _require_alike(node)
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
        """Let a node read what other clusters, or nodes outside, have made for its micro-batch, and run only for one.

        Raises:
            PassError: something that it reads may not be there, or will be there only later.
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
        if gate is None:
            if not node.inputs and not node.controls:
                node.add_control(self._loops[cluster.kind].number.node)
        elif not any(producer in self.of for producer in predecessors(node)):
            node.add_control(gate.micro.node)

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
        """Return what the forward loop has kept of a value for the micro-batch that a backward cluster works on."""
        if (value, cluster) not in self._items:
            with self._at(source) as loop:
                kept = loop.kept(value)
            gate, behind = self._gate(cluster), self._loops[BACKWARD]
            assert gate is not None
            with behind.at(source.part):
                self._items[value, cluster] = behind.item(kept, value, gate.micro)
        return self._items[value, cluster]

    def _wait(self, node: Node, control: Node, cluster: Cluster) -> None:
        """Keep what a control edge from outside of its cluster is for."""
        source = self.of.get(control)
        if source is None:
            self._loops[cluster.kind].wait_for(control)
        elif source.kind == FORWARD and cluster.kind == BACKWARD:
            with self._at(source) as loop:
                self._loops[BACKWARD].wait_for(loop.ran(control))
        elif self._distance(node, control, source, cluster) and not is_pure(control.op):
            raise PassError(
                f"'{node.name}' waits for '{control.name}', which is in another stage", node=node, hint=UNROLL
            )

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
        """Return when a cluster runs: its row of the table has a micro-batch for each iteration, or none."""
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

    # Results of the loops: what readers outside of them read instead of the values of all micro-batches.
    #
    #     before   AddN(all(%dw))           ConcatV2(all(%y), 0)          Identity(first(%lr))
    #     after    the sum that the loop    its list, joined behind it    its value of the first micro-batch
    #              has carried
    #
    # What waited for nodes of a loop waits until they have run for all micro-batches.

    def _read_behind(self, node: Node, unconditional: Container[Node], replicas: int) -> None:
        """Let a node outside of loops read what they have made of a value.

        Args:
            node: runs once, or once on each replica.
            unconditional: the nodes that run in any case, not only in some branch.
            replicas: how many loops of each kind there are side by side.

        Raises:
            PassError: it reads all micro-batches in a way that a loop cannot prepare, or what may not be there in each.
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
                        node.set_input(index, loop.first(value), Select.FIRST if node.span == ONCE else None)
            return
        made, join = _joined(node)
        with self._at(inside[node.inputs[0].node]) as loop:
            joined = made(loop, node.inputs[0])
        if node.span == PER_REPLICA:
            new = Builder.at(node, span=EACH).node("Identity", joined, what="looped")
        elif replicas == 1:
            new = build.node("Identity", joined, what="looped", selects={0: Select.FIRST})
        else:
            axis = [Builder(self._graph, node.name).const(0, dtypes.INT32, "axis")] if join == "ConcatV2" else []
            new = build.node(join, joined, *axis, what="looped", selects={0: Select.ALL}, N=replicas)
        for control in node.controls:
            new.add_control(control)
        self._graph.replace(node, new)


def _is_plain_constant(node: Node) -> bool:
    """Return whether a node is a constant that is the same for all micro-batches."""
    return node.op == "Const" and not any(isinstance(raw, PerInstance) for raw in node.attrs.values())


def _require_alike(node: Node) -> None:
    """Refuse attributes that differ between iterations.

    Raises:
        PassError: there is one.
    """
    for key, raw in node.attrs.items():
        if isinstance(raw, PerInstance):
            raise PassError(f"'{key}' of '{node.name}' differs between micro-batches", node=node, hint=UNROLL)


def _require_certain(node: Node, producer: Node, is_certain: bool) -> None:
    """Refuse what only some branch gives to a loop from outside: the loop would wait for it, or end with it.

    Raises:
        PassError: the producer is in a branch.
    """
    if not is_certain:
        problem = f"'{node.name}' is in a branch, and needs '{producer.name}' of it from outside of the loop"
        raise PassError(problem, node=node, hint=UNROLL)


def _table_of(node: Node, mesh: Mesh) -> Value:
    """Return, as a table of each replica, a constant that differs between micro-batches: [micro, ...]."""
    raw = node.attrs["value"]
    assert isinstance(raw, PerInstance)
    arrays = [np.asarray(decode(one)) for one in raw.raws]
    tables = [np.stack(arrays[r * mesh.size(MICRO) : (r + 1) * mesh.size(MICRO)]) for r in range(mesh.size(REPLICA))]
    own = PerInstance(tuple(encode("tensor", one) for one in tables)) if mesh.size(REPLICA) > 1 else tables[0]
    return Builder.at(node, span=EACH).op("Const", what="table", dtype=node.output_dtypes[0], value=own)


def _joined(node: Node) -> tuple[Callable[[Loop, Value], Value], str]:
    """Return what a loop makes of the value that a node joins, and the op that joins the replicas."""
    if node.op == "AddN":
        return Loop.total, "AddN"
    if node.op == "Pack" and not node.attr("axis", 0):
        return Loop.stacked, "ConcatV2"
    if node.op == "ConcatV2":
        axis = _axis(node)
        if axis:
            problem = f"'{node.inputs[0].name}' is joined along dimension {axis}"
            raise PassError(problem, node=node, hint=UNROLL)
        return Loop.joined, "ConcatV2"
    raise PassError(f"{node.op} '{node.name}' reads all micro-batches", node=node, hint=UNROLL)


def _axis(node: Node) -> int:
    axis: Any = node.inputs[1].node.attr("value") if node.inputs[1].node.op == "Const" else 1
    return int(axis)
