"""What a call costs: one step of a model with next to no work, distributed against bare.

With one replica the rewritten graph is the original one, so the difference is the price of calling it through
`ar.distribute`; with two, the graph itself does more.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.timing import Times, interleaved

TITLE = "overhead of a call: a dense layer of 10 parameters"
CASES = {
    "bare tf.function": ("single", 1),
    "shared, 1 replica": ("shared", 1),
    "shared, 2 replicas": ("shared", 2),
    "mirrored, 2 replicas": ("mirrored", 2),
    "MirroredStrategy, 2 replicas": ("strategy", 2),
}


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    arguments = {"rounds": effort.rounds(15), "seconds": effort.seconds(0.3)}
    times: Times = call("benchmarks.overhead:measure", arguments, timeout=120)
    wall = times["wall"]
    bare, one = wall["bare tf.function"], wall["shared, 1 replica"]
    added = median(a - b for a, b in zip(one, bare, strict=True))
    figures = [
        Figure(
            "added to a call by ar.distribute",
            added * 1e6,
            "us",
            how=f"one replica: {median(one) * 1e6:.0f} us instead of {median(bare) * 1e6:.0f} us",
        )
    ]
    figures += [Figure(f"  {name}", median(wall[name]) * 1e6, "us per step") for name in CASES]
    return figures, {"times": times}


def measure(rounds: int, seconds: float) -> Times:
    """Time one call in every way (in a child)."""
    contestants.split_cpu(2)
    steps = {name: contestants.prepare(how, "small", replicas).start() for name, (how, replicas) in CASES.items()}
    return interleaved(steps, rounds=rounds, seconds=seconds, warm_up=5)
