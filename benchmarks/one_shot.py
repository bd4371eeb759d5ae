"""Sums between processes: in one shot, around the ring, and as an all-to-all and a gather, by size and by processes.

one-shot   CollectiveGatherV2, AddN                          n - 1 messages of all bytes, one behind the other
ring       CollectiveReduceV2                                2 (n - 1) of 1 / n of them: a reduce-scatter, a gather
two-shot   CollectiveAllToAllV2, AddN, CollectiveGatherV2    1 + n - 1 of 1 / n of them, in two collectives
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.dist import environments, free_addresses
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "sums between processes, by size"
ALGORITHMS = ("one-shot", "ring", "two-shot")
CASES = ((2, 4), (2, 64), (2, 512), (2, 4096), (3, 4), (3, 144), (4, 4), (4, 96), (4, 4096))
"""Processes, and KiB of what each has."""
BY_DEFAULT = {2: 512, 3: 144, 4: 96}
"""KiB up to which the package takes one shot (`resolve.edges.one_shot`)."""
IN_ROW = 4


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures, details = [], {}
    for processes, kib in effort.some(CASES):
        found = details[f"{processes}, {kib} KiB"] = _sums(processes, kib, effort)
        how = " / ".join(milliseconds(median(found[who]) / IN_ROW) for who in ALGORITHMS)
        limit = 1.0 if kib <= BY_DEFAULT[processes] else None
        what = f"{kib:,} KiB between {processes} processes"
        figures.append(
            Figure(f"{what}: one-shot / ring", ratio(found["one-shot"], found["ring"]), at_most=limit, how=how)
        )
        figures.append(Figure(f"{what}: two-shot / ring", ratio(found["two-shot"], found["ring"])))
    return figures, details


def _sums(processes: int, kib: int, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds of some sums, one behind the other, one number per round."""
    with ExitStack() as stack:
        crews = {}
        for algorithm in ALGORITHMS:
            given = {"algorithm": algorithm, "members": processes, "numbers": kib * 256}
            told = environments({"worker": free_addresses(processes)})
            crews[algorithm] = stack.enter_context(
                Crew("benchmarks.one_shot:step", [given | {"worker": i} for i in range(processes)], told)
            )
            crews[algorithm].ready()
        return times(crews, rounds=effort.rounds(9), calls=2 if effort.tiny else 10)


def step(algorithm: str, members: int, numbers: int, worker: int) -> Callable[[], Any]:
    """Return what sums up some vectors, one behind the other (in its process)."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow as tf

    import autograph_rewrite as ar

    ar.join()
    raw = tf.raw_ops
    keys = iter(range(1, 1000))
    vector = tf.fill([-(-numbers // members) * members], float(worker))

    def collective(op: Any, value: Any) -> Any:
        named = {"group_size": members, "group_key": 1, "instance_key": next(keys), "ordering_token": []}
        return op(input=value, communication_hint="auto", timeout_seconds=0, **named)

    def reduce(value: Any) -> Any:
        if algorithm == "ring":
            merged = {"merge_op": "Add", "final_op": "Id"}
            return collective(lambda **given: raw.CollectiveReduceV2(**given, **merged), value)
        if algorithm == "one-shot":
            return tf.add_n(tf.split(collective(raw.CollectiveGatherV2, value), members))
        parts = collective(raw.CollectiveAllToAllV2, tf.reshape(value, [members, -1]))
        return collective(raw.CollectiveGatherV2, tf.add_n(tf.unstack(parts, members)))

    @tf.function
    def sums() -> Any:
        total = vector
        for _ in range(IN_ROW):
            total = reduce(total) / members
        return total[0]

    return lambda: sums().numpy()
