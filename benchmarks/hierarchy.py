"""Several replicas in each of two processes: sums that are made in a process first, and one ring of all replicas.

hierarchical   AddN in each process ─► ring of two processes      what `hint: auto` takes among CPU devices
ring           ring of all replicas                               `hint: ring`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.dist import environments, free_addresses
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import Crew, times

TITLE = "several replicas in each of two processes"
HINTS = {"hierarchical": "auto", "ring": "ring"}
PROCESSES = 2


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures, details = [], {}
    for name in effort.some(("mlp", "sixty")):
        for replicas in effort.some((2, 4)):
            found = details[f"{name}, {replicas}"] = _steps(name, replicas, effort)
            how = " / ".join(milliseconds(median(found[who])) for who in HINTS)
            what = f"{name}, {replicas} replicas in each process: added up there first / one ring"
            figures.append(Figure(what, ratio(found["hierarchical"], found["ring"]), at_most=1.0, how=how))
    return figures, details


def _steps(name: str, replicas: int, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each, one number per round."""
    with ExitStack() as stack:
        crews = {}
        for who, hint in HINTS.items():
            given = {"hint": hint, "name": name, "replicas": replicas, "tiny": effort.tiny}
            told = environments({"worker": free_addresses(PROCESSES)})
            crew = Crew("benchmarks.hierarchy:step", [{**given, "worker": i} for i in range(PROCESSES)], told)
            crews[who] = stack.enter_context(crew)
            crews[who].ready()
        return times(crews, rounds=effort.rounds(9), calls=2 if effort.tiny else 10)


def step(hint: str, name: str, replicas: int, tiny: bool, worker: int) -> Callable[[], Any]:
    """Return the training step of one worker on its part of the batch (in its process)."""
    contestants.split_cpu(replicas)
    import tensorflow as tf

    import autograph_rewrite as ar
    from benchmarks import programs

    program = programs.build(name, tiny=tiny)
    size = len(program.y) // PROCESSES
    x, y = (tf.constant(whole[worker * size :][:size]) for whole in (program.x, program.y))
    config = {"devices": [f"CPU:{i}" for i in range(replicas)], "strategy": {"name": "AllReduce", "hint": hint}}
    train = ar.distribute(programs.single_step(program), config)
    return lambda: train(x, y)
