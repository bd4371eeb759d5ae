"""Playing a list of tasks, event by event: each starts when what it needs has ended and its lanes are free.

Lanes serve in the order in which tasks become ready, as TensorFlow's executor and its channels do.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from autograph_rewrite.cost.tasks import Task


def play(tasks: Sequence[Task], cores: Mapping[str, int]) -> float:
    """Set start and end of every task; return when the last one ends.

    Args:
        tasks: in an order in which they could run.
        cores: the lanes that take several tasks at a time.
    """
    free: dict[str, list[float]] = {lane: [0.0] * count for lane, count in cores.items()}
    waiting = [0] * len(tasks)
    users: list[list[int]] = [[] for _ in tasks]
    ready_at = [0.0] * len(tasks)
    for index, task in enumerate(tasks):
        task.index = index
    for index, task in enumerate(tasks):
        for needed in set(task.needs):
            users[needed.index].append(index)
            waiting[index] += 1
    ready = [(0.0, index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    last = 0.0
    while ready:
        at, index = heapq.heappop(ready)
        task = tasks[index]
        task.ready, task.start = at, _start(task, at, free)
        task.end = task.start + task.seconds
        last = max(last, task.end)
        for user in users[index]:
            ready_at[user] = max(ready_at[user], task.end)
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (ready_at[user], user))
    return last


def _start(task: Task, at: float, free: dict[str, list[float]]) -> float:
    """Take the task's lanes as soon as all of them are free; return when that is."""
    for lane, seconds in task.holds.items():
        slots = free.setdefault(lane, [0.0])
        if seconds:
            at = max(at, slots[min(task.width, len(slots)) - 1])
    for lane, seconds in task.holds.items():
        slots = free[lane]
        if seconds:
            width = min(task.width, len(slots))
            slots[:width] = [at + seconds] * width
            slots.sort()
    return at
