"""Runs a schedule of a pipeline on paper: how long it takes, and what waits."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD, Orders, Task, in_flight


class Simulated(NamedTuple):
    """How a schedule comes out.

    Attributes:
        makespan: when the last task ends.
        in_flight: by device, how many of its forwards at most wait for their backwards at one time.
        busy: by device, how long it works.
    """

    makespan: Fraction
    in_flight: tuple[int, ...]
    busy: tuple[Fraction, ...]

    @property
    def bubble(self) -> Fraction:
        """The share of all devices' time in which they wait."""
        return 1 - sum(self.busy, Fraction(0)) / (self.makespan * len(self.busy))


def simulate(given: Orders, forward: Sequence[Fraction | int], backward: Sequence[Fraction | int]) -> Simulated:
    """Run a schedule on paper.

    Args:
        forward: how long the forward part of one micro-batch takes, by stage.
        backward: the same of its backward part.

    Raises:
        PlanError: the devices wait for each other; the message shows the cycle.
    """
    stages, ends = len(forward), dict[Task, Fraction]()
    clocks, next_up = [Fraction(0)] * len(given), [0] * len(given)
    costs = {FORWARD: forward, BACKWARD: backward}
    left = sum(map(len, given))
    while left:
        before = left
        for device, tasks in enumerate(given):
            while next_up[device] < len(tasks):
                task = tasks[next_up[device]]
                needed = _needs(task, stages)
                if needed is not None and needed not in ends:
                    break
                ready = ends[needed] if needed is not None else Fraction(0)
                clocks[device] = max(clocks[device], ready) + costs[task.kind][task.stage]
                ends[task] = clocks[device]
                next_up[device] += 1
                left -= 1
        if left == before:
            raise PlanError(f"the schedule waits for itself: {_deadlock(given, next_up, stages)}")
    busy = tuple(sum((Fraction(costs[t.kind][t.stage]) for t in tasks), Fraction(0)) for tasks in given)
    return Simulated(max(clocks), tuple(in_flight(tasks) for tasks in given), busy)


def _needs(task: Task, stages: int) -> Task | None:
    """Return the task of another stage, or of the same one, whose result a task works on."""
    if task.kind == FORWARD:
        return task._replace(stage=task.stage - 1) if task.stage else None
    last = task.stage == stages - 1
    return task._replace(kind=FORWARD) if last else task._replace(stage=task.stage + 1)


def _deadlock(given: Orders, next_up: Sequence[int], stages: int) -> str:
    place = {task: (device, i) for device, tasks in enumerate(given) for i, task in enumerate(tasks)}
    stuck = next(tasks[at] for tasks, at in zip(given, next_up, strict=True) if at < len(tasks))
    path: list[Task] = []
    while stuck not in path:
        path.append(stuck)
        needed = _needs(stuck, stages)
        if needed is None or needed not in place:
            return f"{stuck} needs {needed}, which nobody runs"
        device, at = place[needed]
        stuck = given[device][next_up[device]] if at >= next_up[device] else needed
    return " waits for ".join(str(task) for task in [*path[path.index(stuck) :], stuck])
