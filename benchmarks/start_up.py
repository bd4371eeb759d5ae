"""Time to the first step: from the Python function to the end of its first step, in fresh processes.

A 100-layer model with Adam on 4 replicas; model and data are made before. Every way of running traces the function;
then MirroredStrategy traces it once per replica and lets TensorFlow's graph optimizer work on everything, while the
rewrite works on one replica's graph and multiplies that at the very end.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.timing import ratio

TITLE = "time to first step: 100-layer MLP, Adam, 4 replicas"
REPLICAS = 4


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    times: dict[str, list[float]] = {how: [] for how in contestants.HOW}
    for _ in range(effort.rounds(2)):
        for how in contestants.HOW:
            arguments = {"how": how, "tiny": effort.tiny}
            times[how].append(call("benchmarks.start_up:measure", arguments, timeout=150))
    medians = {how: median(seconds) for how, seconds in times.items()}
    figures = [
        Figure(
            f"{how} / MirroredStrategy",
            ratio(times[how], times["strategy"]),
            at_most=0.4,
            how=f"{medians[how]:.2f} s / {medians['strategy']:.2f} s",
        )
        for how in ("shared", "mirrored")
    ]
    figures.append(Figure("a bare tf.function on one device", medians["single"], "s"))
    return figures, {"times": times}


def measure(how: str, tiny: bool) -> float:
    """Return the seconds from the function to its first result (in a child)."""
    contestants.split_cpu(REPLICAS)
    contestant = contestants.prepare(how, "deep", REPLICAS, tiny=tiny)
    began = time.perf_counter()
    contestant.start()()
    return time.perf_counter() - began
