"""Reads of variables that are not on the replica: pulled from servers, or all-gathered from shards.

shards here     ConcatV2 ──► ReadVariableOp
on servers      pull ──► ReadVariableOp          rows: what a gather looks up is pulled, not the table
stage 1, 2      gather of the updated shards ──► ReadVariableOp
stage 3         gather ──► forward readers,  gather again ──► backward readers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autograph_rewrite.analysis.work.op_work import Work
from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep
from autograph_rewrite.cost.tasks.communication import exchange_task, pass_task
from autograph_rewrite.cost.tasks.task import Buffer, Task
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.residence import Residence


class Pulled(NamedTuple):
    """What a read waits for, and the memory that holds what it gets."""

    tasks: tuple[Task, ...] = ()
    buffer: Buffer | None = None


class Reads:
    """Makes the exchanges that bring variables to where they are read."""

    def __init__(self, folded: AnalyzedStep, held: Mapping[str, Residence], topology: Topology, sizes: Sizes) -> None:
        self._folded, self._held, self._topology, self._sizes = folded, held, topology, sizes
        self._chains: dict[tuple[str, str], list[Task]] = {}  # each of them after the one before
        self._buffers: dict[tuple[str, str, str], Buffer] = {}
        self._gathered: dict[Buffer, str] = {}  # buffers that are given back between forward and backward
        self._forward: set[Node] = set()
        self._times = topology.plan.microbatches if topology.plan.gathers_for_each else 1
        self.regathers = any(holder.stage == 3 for holder in held.values())
        if self.regathers:
            self._forward = ancestors([value.node for value in folded.outputs], controls=False)

    def of(self, node: Node, lane: str) -> Pulled:
        """Return what brings a node the variable that it reads; nothing where the replica holds it."""
        name = self._folded.variable_of(node) if self._held else None
        holder = self._held.get(name) if name is not None else None
        if holder is None or name is None or self._folded.region.get(node) == name or has(node.op, "declares"):
            return Pulled()
        what = node.name if has(node.op, "reads_rows") else "whole"
        if not (holder.is_on_server or holder.stage):
            return self._join(name, lane) if len(holder.sizes) > 1 and not has(node.op, "reads_rows") else Pulled()
        if holder.stage:
            pulled = self._gather(name, what, lane, kept=holder.stage < 3)
            if holder.stage == 3 and pulled.buffer is not None:
                self._gathered[pulled.buffer] = name
            return pulled
        return self._pull(node, name, what, lane)

    def again(self, made: Buffer, node: Node, waits: Sequence[Task | None]) -> Pulled | None:
        """Return what brings a backward reader a variable whose whole was given back; None where it is still there.

        Args:
            made: the buffer that the forward pass gathered.
            waits: what makes the other inputs of the reader: before them, the whole is not needed.
        """
        name = self._gathered.get(made)
        if name is None or node in self._forward or self._folded.region.get(node) == name:
            return None
        begins = (name, "again") not in self._chains
        pulled = self._gather(name, "again", made.place)
        if begins:
            self._chains[name, "again"][0].after(waits)
        return pulled

    def _gather(self, name: str, what: str, lane: str, *, kept: bool = False) -> Pulled:
        """Return the gather of all shards; where replicas keep the whole, it is written in place."""
        whole = self._folded.item.variables[name].nbytes
        if (name, what) not in self._chains:
            times = 1 if kept else self._times
            exchange = self._topology.ring_gather(times * whole / self._topology.plan.replicas)
            sent = exchange_task(f"gather {name}", "all_gather", exchange)
            join = self._joining(name, times * (1 if self._topology.on_cpu else self._topology.local))
            join.after([sent])
            self._chains[name, what] = [sent, join]
        return self._held_on(name, what, lane, 0 if kept else whole, each=True)

    def _pull(self, node: Node, name: str, what: str, lane: str) -> Pulled:
        """Return the pull of a variable on servers, or of the rows of it that a node looks up on all replicas."""
        nbytes = self._folded.item.variables[name].nbytes
        if has(node.op, "reads_rows"):
            rows = self._sizes.nbytes(self._folded.state.source(node.output()))
            nbytes = rows * (self._topology.local if node in self._folded.each else 1)
        if (name, what) not in self._chains:
            exchange = self._topology.pull(nbytes, *self._held[name].servers)
            self._chains[name, what] = [exchange_task(f"pull {name}", "pull", exchange)]
        is_there = has(node.op, "reads_rows") or not self._chains[name, what][0].traffic
        if is_there and len(self._held[name].sizes) > 1 and not has(node.op, "reads_rows"):
            joined = self._join(name, lane, each=False)
            joined.tasks[0].after(self._chains[name, what])
            return joined
        return self._held_on(name, what, lane, 0 if is_there else nbytes, each=False)

    def _join(self, name: str, lane: str, *, each: bool = True) -> Pulled:
        """Return what makes the whole of the shards that a process has itself."""
        if (name, "joined") not in self._chains:
            self._chains[name, "joined"] = [self._joining(name, self._topology.local if each else 1)]
        nbytes = self._folded.item.variables[name].nbytes
        return self._held_on(name, "joined", lane, nbytes, each=each)

    def _joining(self, name: str, instances: int) -> Task:
        """Return the task that copies shards into the whole."""
        work = Work("elementwise", 0.0, 2.0 * self._folded.item.variables[name].nbytes)
        return pass_task(f"join {name}", "ConcatV2", work, instances, self._topology)

    def _held_on(self, name: str, what: str, lane: str, nbytes: int, *, each: bool) -> Pulled:
        """Return the exchange with the memory on one lane."""
        task = self._chains[name, what][-1]
        key = (name, what, lane)
        if key not in self._buffers:
            self._buffers[key] = Buffer(nbytes, lane, each, task)
        return Pulled((task,), self._buffers[key])

    @property
    def tasks(self) -> list[Task]:
        """All exchanges, and what joins what they bring."""
        return [task for chain in self._chains.values() for task in chain]

    @property
    def buffers(self) -> list[Buffer]:
        """What they bring."""
        return list(self._buffers.values())
