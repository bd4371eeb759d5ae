"""Balanced cut of a chain into stages: minimise the heaviest stage, then the bytes that cross.

cost   3 1 1 1 3 3      stages 3      ──►   3 1 1 | 1 3 | 3        heaviest 5; then as few bytes as possible cross

Zheng et al., Alpa (2022), construct stages by a dynamic program over cuts and meshes of devices; here all stages have
equal devices, so that only the cuts are chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from autograph_rewrite.errors import PlanError


def balanced_cut(costs: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """Return where each stage but the first begins.

    Args:
        costs: of each unit, in order.
        crossing: what would have to be sent if a stage began at a unit, by unit.
        stages: how many; none of them will be empty.

    Raises:
        PlanError: there are fewer units than stages.
    """
    if len(costs) < stages:
        raise PlanError(
            f"the model has {len(costs)} operations that can be divided, fewer than {stages} stages",
            hint="use fewer stages",
        )
    sums = [0.0, *accumulate(costs)]
    limit = _lightest_limit(costs, sums, stages) * (1 + 1e-9)
    best = [0.0] + [float("inf")] * len(costs)
    choices: list[list[int]] = []
    for _ in range(stages):
        best, chosen = _extend(best, sums, crossing, limit)
        choices.append(chosen)
    begins = [len(costs)]
    for chosen in reversed(choices):
        begins.append(chosen[begins[-1]])
    return begins[-2:0:-1]


def _lightest_limit(costs: Sequence[float], sums: Sequence[float], stages: int) -> float:
    """Return the least cost that the heaviest stage can have."""
    low, high = max(max(costs), sums[-1] / stages), sums[-1]
    for _ in range(60):
        middle = (low + high) / 2
        if _stages_needed(sums, middle) <= stages:
            high = middle
        else:
            low = middle
    return high if _stages_needed(sums, low) > stages else low


def _stages_needed(sums: Sequence[float], limit: float) -> int:
    count, begin = 0, 0
    while begin < len(sums) - 1:
        end = bisect_left(sums, sums[begin] + limit * (1 + 1e-12), begin + 1)
        end = end if end < len(sums) and sums[end] <= sums[begin] + limit * (1 + 1e-12) else end - 1
        begin = max(end, begin + 1)
        count += 1
    return count


def _extend(
    best: Sequence[float], sums: Sequence[float], crossing: Sequence[float], limit: float
) -> tuple[list[float], list[int]]:
    """Add one stage: return the bytes that cross in all, and where the last stage begins, by where it ends."""
    new, chosen = [float("inf")] * len(sums), [0] * len(sums)
    window: deque[tuple[float, int]] = deque()
    for end in range(1, len(sums)):
        begin = end - 1
        total = best[begin] + (crossing[begin] if begin else 0.0)
        while window and window[-1][0] > total:
            window.pop()
        window.append((total, begin))
        while window and sums[end] - sums[window[0][1]] > limit:
            window.popleft()
        if window:
            new[end], chosen[end] = window[0]
    return new, chosen
