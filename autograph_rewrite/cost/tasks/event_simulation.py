"""Discrete-event simulation: a task starts when its inputs are there and its resources (lanes) are free.

Lanes serve in the order in which tasks become ready, as TensorFlow's executor and its channels do.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from autograph_rewrite.cost.tasks.task import Task


def simulate_events(tasks: Sequence[Task], cores: Mapping[str, int]) -> float:
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
        task.ready = at
        task.start, task.end = _run(task, at, free)
        last = max(last, task.end)
        for user in users[index]:
            ready_at[user] = max(ready_at[user], task.end)
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (ready_at[user], user))
    return last


def _run(task: Task, at: float, free: dict[str, list[float]]) -> tuple[float, float]:
    """Take the task's lanes as soon as all of them are free; return when it starts and ends.

    A task of several cores runs on fewer, for longer, where it ends sooner so than by waiting for all.
    """
    held = [(free.setdefault(lane, [0.0]), seconds) for lane, seconds in task.holds.items() if seconds]
    most = max([min(task.width, len(slots)) for slots, _ in held], default=1)
    ends = []
    for width in range(1, most + 1):
        start = max([at, *(slots[min(width, len(slots)) - 1] for slots, _ in held)])
        ends.append((start + task.seconds * most / width, width, start))
    end, width, start = min(ends)
    for slots, seconds in held:
        taken = min(width, len(slots))
        slots[:taken] = [start + seconds * most / width] * taken
        slots.sort()
    return start, end
