"""Dense synchronous jobs of two processes: rewritten, and in `tf.distribute.MultiWorkerMirroredStrategy`.

ours      ar.distribute, each process with half of the batch
theirs    the same model in a custom training loop of MultiWorkerMirroredStrategy, each with the same half
alone     a bare tf.function on that half, both processes at the same time, so that the machine is as loaded

What the exchange adds to the computing is the step of two processes without that of one alone. Each process has a core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.dist import environments, free_addresses, pin
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "two processes beside MultiWorkerMirroredStrategy, pinned to a core each"
HOW = ("ours", "theirs", "alone")
PROGRAMS = ("mlp", "cnn", "sixty")
WORKERS = 4
"""Of the job whose start is measured."""


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures, details = [], {}
    for name in effort.some(PROGRAMS):
        found = details[name] = steps(name, effort)
        figures += _figures(name, found)
    started = details["start"] = starts(effort)
    how = " / ".join(milliseconds(median(started[who])) for who in HOW[:2])
    name = f"start of {WORKERS} processes to the end of the first step: ours / theirs"
    figures.append(Figure(name, ratio(started["ours"], started["theirs"]), at_most=1.1, how=how))
    return figures, details


def steps(name: str, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, one number per round."""
    with ExitStack() as stack:
        crews = {}
        for how in HOW:
            crews[how] = stack.enter_context(crew(how, 2, {"name": name, "tiny": effort.tiny}))
            crews[how].ready()
        return times(crews, rounds=effort.rounds(15), calls=2 if effort.tiny else 20)


def starts(effort: Effort) -> dict[str, list[float]]:
    """Return the seconds from the start of a job to the end of its first step, of jobs in turn."""
    found: dict[str, list[float]] = {how: [] for how in HOW[:2]}
    for number in range(effort.rounds(3)):
        for how in sorted(found, reverse=bool(number % 2)):
            with crew(how, WORKERS, {"name": "mlp", "tiny": effort.tiny}) as job:
                found[how].append(max(job.ready()))
    return found


def crew(
    how: str,
    count: int,
    arguments: Mapping[str, Any],
    addresses: Sequence[str] = (),
    prefixes: Sequence[Sequence[str]] = (),
) -> Crew:
    """Start the processes of a contestant; alone, none of them knows of another.

    Args:
        how: one of HOW.
        count: of processes.
        arguments: of `step`.
        addresses: of the processes; left out: free ones of this machine.
        prefixes: what starts each of them, as `ip netns exec NAME`.
    """
    told: list[dict[str, str]] = [{} for _ in range(count)]
    if how != "alone":
        told = environments({"worker": list(addresses) or free_addresses(count)})
    given = [{**arguments, "how": how, "worker": worker, "workers": count} for worker in range(count)]
    return Crew("benchmarks.dist_dense:step", given, told, prefixes)


def step(
    how: str, name: str, tiny: bool, worker: int, workers: int, config: Mapping[str, Any] | None = None
) -> Callable[[], Any]:
    """Return the training step of one worker on its part of the batch (in its process)."""
    if workers <= (os.cpu_count() or 1):
        pin(worker)
    import tensorflow as tf

    if how == "theirs":
        return _in_strategy(name, tiny, worker, workers)
    import autograph_rewrite as ar
    from benchmarks import programs

    program = programs.build(name, tiny=tiny)
    part = _part(len(program.y), worker, workers)
    x, y = tf.constant(program.x[part]), tf.constant(program.y[part])
    train = programs.single_step(program)
    function = tf.function(train) if how == "alone" else ar.distribute(train, {"devices": ["CPU:0"], **(config or {})})
    return lambda: function(x, y)


def _in_strategy(name: str, tiny: bool, worker: int, workers: int) -> Callable[[], Any]:
    """Follow TensorFlow's guide to custom training loops; every worker has its part of the batch ready."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    from benchmarks import programs

    with strategy.scope():
        program = programs.build(name, tiny=tiny)
    batch = len(program.y)
    part = _part(batch, worker, workers)
    x, y = tf.constant(program.x[part]), tf.constant(program.y[part])

    @tf.function
    def train(x: Any, y: Any) -> Any:
        losses = strategy.run(lambda a, b: program.train(a, b, batch), (x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return lambda: train(x, y)


def _part(batch: int, worker: int, workers: int) -> slice:
    return slice(batch * worker // workers, batch * (worker + 1) // workers)


def _figures(name: str, found: Mapping[str, Sequence[float]]) -> list[Figure]:
    ours, theirs, alone = (found[how] for how in HOW)
    how = f"{milliseconds(median(ours))} / {milliseconds(median(theirs))}; alone {milliseconds(median(alone))}"
    added = [[a - b for a, b in zip(both, alone, strict=True)] for both in (ours, theirs)]
    more = " / ".join(milliseconds(median(one)) for one in added)
    what = ratio(*added)
    return [
        Figure(f"{name}, step of two processes: ours / theirs", ratio(ours, theirs), at_most=1.0, how=how),
        Figure(f"{name}, what the exchange adds to computing alone: ours / theirs", what, at_most=0.7, how=more),
    ]
