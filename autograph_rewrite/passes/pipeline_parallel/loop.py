"""Run a pipeline as two loops: in each iteration all stages work, on consecutive micro-batches.

    iteration      0   1   2   3   4   5                  forward loop of 3 stages and 4 micro-batches
    stage 0       F0  F1  F2  F3   -   -
    stage 1        -  F0  F1  F2  F3   -                  h of F0@0 is in the slot that F0@1 reads one iteration later
    stage 2        -   -  F0  F1  F2  F3

    after         slot = 0;  loop t < M+S-1:  per stage, if m = turn[t] is one:  h = body(slot, batch[m]);  slot = h
                  and the same backward, from the last stage to the first, by what the forward loop has kept

Nothing of a stage runs in an iteration that has no micro-batch for it: nothing has to be masked, no state repaired.
What a stage makes is handed on through slots that the loop carries, or kept in a list for the backward loop. Each
device has several stages where they go round (`circular_repeat`); one of them at most runs in an iteration. Relies on
the folded graph being complete, and on its stages (`resolve.stages.assignment`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.barriers import predecessors
from autograph_rewrite.errors import PassError, PlanError
from autograph_rewrite.ir.graph import Graph, Node, Span, Value
from autograph_rewrite.ir.op_traits import is_pure
from autograph_rewrite.ir.replication import prefix
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.micro_batches.loop import (
    is_plain_constant,
    order_of_bodies,
    require_alike,
    require_certain,
    require_closed,
    table_of,
)
from autograph_rewrite.passes.micro_batches.loop_results import read_behind
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL, Loop
from autograph_rewrite.passes.pipeline_parallel.placement import complete_stages
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD, turns
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.stages.assignment import Stages

SCOPES = {FORWARD: "autograph_pipeline/forward", BACKWARD: "autograph_pipeline/backward"}


class Cluster(NamedTuple):
    """The forward or backward part of a stage."""

    kind: str
    stage: int


class _Gate(NamedTuple):
    """On which micro-batch a cluster works, or -1; whether it runs; the first again, there only where it runs."""

    turn: Value
    runs: Value
    micro: Value


def roll_stages(graph: Graph, stages: Stages, plan: Plan, slices: Mapping[Value, Value], roots: Iterable[Node]) -> None:
    """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

    Args:
        graph: the folded graph, complete.
        stages: of its EACH nodes; those that are added get theirs.
        plan: says how many replicas, micro-batches and devices there are.
        slices: by block, what it was cut out of.
        roots: what the outside needs.

    Raises:
        PassError: something cannot be done in a loop; the message says what.
        PlanError: the plan has a schedule that a loop has not.
    """
    kept, replicas, micro = list(roots), plan.replicas_each, plan.microbatches
    order, unconditional = order_of_bodies(graph, slices, kept)
    complete_stages(graph, stages)
    devices = _devices(plan, stages)
    made = _Loops(graph, stages, [prefix(r) for r in range(replicas)], turns(micro, devices, stages.count // devices))
    for node in order:
        if node.span is Span.ONCE:
            continue
        if is_plain_constant(node) and node in unconditional:
            for control in node.controls:  # it may be had before, and then nothing outside waits for a loop
                node.remove_control(control)
        else:
            made.add(node)
    for node in [node for node in made.of if node.op == "Const" and not is_plain_constant(node)]:
        made.look_up(node, replicas, micro, unconditional)
    for node in [node for node in order if node in made.of]:
        require_alike(node)
        made.move_in(node, unconditional)
    for node in order:
        if node.span is Span.ONCE and node.name in graph.nodes:
            read_behind(graph, made, node, made.of, unconditional, replicas)
    made.close()
    eliminate_dead_code(graph, kept)
    require_closed(graph)
    stages.of = {node: stage for node, stage in stages.of.items() if node.name in graph.nodes}
    stages.backward &= set(stages.of)


def _devices(plan: Plan, stages: Stages) -> int:
    """Return how many devices the stages of one replica have in turn."""
    assert plan.pipeline is not None
    devices = len(plan.pipeline.devices) // plan.replicas
    wanted = "gpipe" if devices == stages.count else "circular"
    if plan.pipeline.schedule != wanted:
        raise PlanError(
            f"the loop of {stages.count} stages on {devices} devices has the schedule {wanted}, "
            f"and the plan says {plan.pipeline.schedule}",
            hint=f"set pipeline.schedule to {wanted}, or micro.loop to false",
        )
    return devices


class _Loops:
    """The two loops, and which of their clusters each node is in."""

    def __init__(
        self, graph: Graph, stages: Stages, prefixes: list[str], table: tuple[tuple[int | None, ...], ...]
    ) -> None:
        self.of: dict[Node, Cluster] = {}
        self._graph = graph
        self._stages = stages
        self._loops = {kind: Loop(graph, prefixes, len(table[0]), scope) for kind, scope in SCOPES.items()}
        self._table = {FORWARD: table, BACKWARD: table[::-1]}
        self._gates: dict[Cluster, _Gate] = {}
        self._items: dict[tuple[Value, Cluster], Value] = {}

    def add(self, node: Node) -> None:
        """Put a node into the cluster that its stage says."""
        self.of[node] = Cluster(BACKWARD if node in self._stages.backward else FORWARD, self._stages.of[node])

    def look_up(self, node: Node, replicas: int, micro: int, unconditional: set[Node]) -> None:
        """Replace a constant that differs between micro-batches by entries of a table, one in each cluster.

        Raises:
            PassError: it is in a branch.
        """
        require_certain(node, node, unconditional)
        table, own = table_of(self._graph, node, replicas, micro), self.of.pop(node)
        entries: dict[Cluster, Value] = {}
        for reader, index in node.output().uses:
            cluster = self.of.get(reader, own)
            if cluster not in entries:
                with self._at(cluster) as loop:
                    entries[cluster] = loop.entry(table, node.name, self._gates[cluster].micro)
                self.of[entries[cluster].node] = cluster
            reader.set_input(index, entries[cluster], reader.selects.get(index))
        for user in node.control_users:
            user.remove_control(node)
        for control in node.controls:
            node.remove_control(control)
        self._graph.erase(node)

    def move_in(self, node: Node, unconditional: set[Node]) -> None:
        """Let a node read what other clusters, or nodes outside, have made for its micro-batch, and run only for one.

        Raises:
            PassError: something that it reads may not be there, or will be there only later.
        """
        cluster = self.of[node]
        for index, value in enumerate(node.inputs):
            if self.of.get(value.node) == cluster:
                continue
            require_certain(node, value.node, unconditional)
            node.set_input(index, self._brought(node, value, cluster))
        for control in node.controls:
            if self.of.get(control) != cluster:
                require_certain(node, control, unconditional)
                node.remove_control(control)
                self._wait(node, control, cluster)
        if not any(producer in self.of for producer in predecessors(node)):
            with self._at(cluster):
                node.add_control(self._gates[cluster].micro.node)

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
            micro = self._gate(cluster).micro
            with self._loops[BACKWARD].at(source.stage):
                self._items[value, cluster] = self._loops[BACKWARD].item(kept, value, micro)
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
        distance = cluster.stage - source.stage if cluster.kind == FORWARD else source.stage - cluster.stage
        if source.kind != cluster.kind or distance < 1:
            raise PassError(
                f"an edge leads back: '{node.name}' is in stage {cluster.stage} and needs '{producer.name}' "
                f"of stage {source.stage}, which is there only later",
                node=node,
                hint=UNROLL,
            )
        return distance

    def _gate(self, cluster: Cluster) -> _Gate:
        """Return when a cluster runs: its row of the table has a micro-batch for each iteration, or none."""
        if cluster not in self._gates:
            loop, name = self._loops[cluster.kind], f"stage_{cluster.stage}"
            row = [-1 if m is None else m for m in self._table[cluster.kind][cluster.stage]]
            attrs = {"value": np.asarray(row, np.int32), "dtype": dtypes.INT32}
            scope = SCOPES[cluster.kind]
            turn = self._graph.add("Const", name=f"{scope}/{name}/turns", attrs=attrs).output()
            with loop.at(cluster.stage):
                self._gates[cluster] = _Gate(*loop.turn(turn, name))
        return self._gates[cluster]

    @contextmanager
    def _at(self, cluster: Cluster) -> Iterator[Loop]:
        """Add nodes for a cluster."""
        loop, gate = self._loops[cluster.kind], self._gate(cluster)
        with loop.at(cluster.stage, gate.runs, gate.turn):
            yield loop

    def finished(self, node: Node) -> Node:
        """Return what to wait for until a node of a loop has run as often as it does."""
        with self._at(self.of[node]) as loop:
            return loop.ran(node)

    def total(self, value: Value) -> Value:
        """Return the sum of a value over all micro-batches."""
        with self._at(self.of[value.node]) as loop:
            return loop.total(value)

    def first(self, value: Value) -> Value:
        """Return a value as it is of the first micro-batch."""
        with self._at(self.of[value.node]) as loop:
            return loop.first(value)

    def stacked(self, value: Value) -> Value:
        """Return the values of all micro-batches along a new first dimension."""
        with self._at(self.of[value.node]) as loop:
            return loop.stacked(value)

    def joined(self, value: Value) -> Value:
        """Return the values of all micro-batches, joined along their first dimension."""
        with self._at(self.of[value.node]) as loop:
            return loop.joined(value)

    def close(self) -> None:
        """Say where the loops' own nodes are."""
        for kind, loop in self._loops.items():
            self._stages.of |= loop.stages
            self._stages.of |= {node: cluster.stage for node, cluster in self.of.items() if cluster.kind == kind}
