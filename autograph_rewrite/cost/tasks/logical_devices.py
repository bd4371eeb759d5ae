"""Logical devices of a simulated step: which one a task runs on, and what crosses from one to another.

    MatMul on device 1 ──► copy over "CPU:1 to CPU:0" ──► AddN on device 0        once for all readers there

CPU devices of a process see the same memory: what crosses stays where it was made, until its last reader has ended.
"""

from __future__ import annotations

from autograph_rewrite.cost.hardware.topology import Topology
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep
from autograph_rewrite.cost.tasks.task import COMPUTE, EXCHANGE, Buffer, Task
from autograph_rewrite.ir.graph import Node, Value


class LogicalDevices:
    """Puts tasks and buffers on logical devices; without a model axis it does nothing.

    Args:
        folded: the step.
        topology: of the plan.
        tasks: to which moves are added.
        buffers: to which copies are added.
    """

    def __init__(self, folded: AnalyzedStep, topology: Topology, tasks: list[Task], buffers: list[Buffer]) -> None:
        self._logical, self._topology, self._tasks, self._buffers = folded.logical, topology, tasks, buffers
        self.sent: dict[tuple[Value, str, int], tuple[Task, Buffer]] = {}

    def of(self, node: Node | None) -> int:
        """Return the logical device of a node."""
        return self._logical.get(node, 0) if node is not None else 0

    def put(self, task: Task, device: int) -> None:
        """Let a logical device compute a task."""
        own = [lane for lane in task.holds if lane in self._topology.lanes]
        if self._topology.logical > 1 and task.kind == COMPUTE and own:
            task.place = self._topology.place(own[0], device)
            task.holds = {self._topology.computes(lane, device): seconds for lane, seconds in task.holds.items()}

    def put_rest(self) -> None:
        """Put what belongs to no logical device on the first one."""
        if self._topology.logical == 1:
            return
        places = {lane: self._topology.place(lane, 0) for lane in self._topology.lanes}
        for buffer in self._buffers:
            buffer.place = places.get(buffer.place, buffer.place)
        for task in self._tasks:
            if not task.place:
                self.put(task, 0)

    def brought(self, task: Task, value: Value, found: Buffer | None, target: int, lane: str) -> Buffer | None:
        """Let a task wait until a value has come to its logical device; return the buffer that it reads there.

        Args:
            task: the reader.
            value: what it reads.
            found: the buffer where the value was made.
            target: the logical device of the reader.
            lane: of the reader.
        """
        source = self.of(value.node)
        if source == target or found is None or not found.nbytes or found.kept or lane not in self._topology.lanes:
            return found
        key = (value, lane, target)
        if key not in self.sent:
            self.sent[key] = self._send(value, found, target, lane)
        move, arrived = self.sent[key]
        task.after([move])
        return arrived

    def _send(self, value: Value, found: Buffer, target: int, lane: str) -> tuple[Task, Buffer]:
        """Return the move of a value, and the buffer that it arrives in."""
        exchange = self._topology.between(found.nbytes, self.of(value.node), target)
        move = Task(f"copy {value.name}", EXCHANGE, "copy", exchange.holds, exchange.seconds, traffic=exchange.traffic)
        move.after([found.maker])
        self._tasks.append(move)
        if not exchange.holds:
            return move, found
        found.readers.append(move)
        arrived = Buffer(found.nbytes, self._topology.place(lane, target), found.each, move)
        self._buffers.append(arrived)
        return move, arrived
