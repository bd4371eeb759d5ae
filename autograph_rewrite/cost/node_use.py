"""What each node of a simulated step costs: time, memory at the peak, and what is exchanged of what it makes.

The seconds of all nodes together are those for which the first device of a process (and its servers) is busy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autograph_rewrite.cost.hardware.topology import REST
from autograph_rewrite.cost.pipeline.tasks import StagedStep
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep
from autograph_rewrite.cost.tasks.layers import NodeUse
from autograph_rewrite.cost.tasks.task import COMPUTE, Buffer, Task
from autograph_rewrite.cost.tasks.task_graph import Built


@dataclass
class _Sums:
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchanged_bytes: int = 0
    peak_bytes: int = 0


@dataclass
class _ByNode:
    found: dict[str, _Sums] = field(default_factory=dict)

    def of(self, name: str) -> _Sums:
        return self.found.setdefault(name, _Sums())

    def result(self) -> tuple[NodeUse, ...]:
        return tuple(NodeUse(name, **vars(one)) for name, one in self.found.items() if any(vars(one).values()))


def node_uses(folded: AnalyzedStep, built: Built, alive: Iterable[Buffer]) -> tuple[NodeUse, ...]:
    """Return the cost of each node of a step that has been played; the exchange of a gradient is its variable's.

    Args:
        folded: the step.
        built: its tasks.
        alive: what is in the memory of the fullest device at the peak.
    """
    sums, node_of, variables = _ByNode(), dict[Task, str](), folded.item.variables
    for node, tasks in built.tasks_of.items():
        node_of.update(dict.fromkeys(tasks, node.name))
    for group, tasks in built.groups:
        node_of.update(dict.fromkeys(tasks, group.members[0].value.node.name))
        for member in group.members:
            owner = member.edge.owner
            own = sums.of(variables[owner].handle if owner in variables else member.value.node.name)
            own.exchanged_bytes += member.sent
            own.exchange_seconds += sum(map(_exchanging, tasks)) * member.sent / max(1, group.sent)
    for task in built.tasks:
        if task.kind == COMPUTE:
            held = (seconds for lane, seconds in built.busy(task).items() if not lane.startswith(REST))
            sums.of(node_of.get(task, task.name)).seconds += sum(held)
    for buffer in alive:
        maker = node_of.get(buffer.maker, buffer.maker.name) if buffer.maker is not None else buffer.handle
        sums.of(maker).peak_bytes += buffer.nbytes
    return sums.result()


def _exchanging(task: Task) -> float:
    return 0.0 if task.kind == COMPUTE else task.seconds


def staged_uses(step: StagedStep) -> tuple[NodeUse, ...]:
    """Return the seconds of each node of a pipelined step, over all stages of one replica; memory is that of parts."""
    sums = _ByNode()
    for part, nodes in step.staged.parts.items():
        for node, seconds in step.seconds_of(part, nodes):
            sums.of(node.name).seconds += seconds
    return sums.result()
