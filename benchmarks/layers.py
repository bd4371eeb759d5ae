"""Predicted time by layer beside the measured one: do the layers that `simulate` calls dear take the time?

Three programs of the zoo, each on two replicas in a process of its own. The figure is the rank correlation over layers
(Spearman).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure

TITLE = "predicted time by layer beside the measured one: rank correlation"
PROGRAMS = {"mlp": "large", "cnn": "large", "transformer": "small"}
BATCH = 16


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the seconds of each layer."""
    found: dict[str, list[list[Any]]] = {}
    for name, size in PROGRAMS.items():
        arguments = {"name": name, "size": "tiny" if effort.tiny else size}
        found[name] = call("benchmarks.layers:measure", arguments, timeout=200)
    figures = [
        Figure(f"{name}, {len(rows)} layers", correlation(*zip(*(row[1:] for row in rows), strict=True)), unit="")
        for name, rows in found.items()
    ]
    return figures, {"layers": found}


def measure(name: str, size: str) -> list[list[Any]]:
    """Return the layers of a program: name, seconds predicted, seconds measured."""
    import autograph_rewrite as ar
    from autograph_rewrite.cost.tasks.layers import ITSELF
    from autograph_rewrite.inspect.report import measured_by_scope
    from tests.zoo import ZOO

    built = ZOO[name].build(size=size, optimizer="adam", dtype="float32")
    item = built.item()
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "shared"}}
    new = ar.rewrite(item, config)
    with new.session() as session:
        session.run(new.init_op)
        feeds = built.feeds(0, BATCH)
        profile = ar.profile(session, [built.loss, built.train_op], feeds, steps=10, original=item)
    took = measured_by_scope(profile)
    predicted = ar.simulate(item, config, batch=BATCH)
    layers = [one for one in predicted.layers() if not one.name.endswith(ITSELF)]
    return [[one.name, one.seconds, took.get(one.name, 0.0)] for one in layers]


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; what is equal shares its rank."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    shared = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return float(shared / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(one) + (ordered.count(one) - 1) / 2 for one in values]
