"""What a second mesh axis costs while a graph is rewritten: BERT-base on `{data: 2, model: 2}` beside two replicas.

The model axis has Megatron's splits (Shoeybi et al., 2019). Propagation on one axis is the pass `propagate`; on two it
is the search for placements on the model axis, and that pass on the graph in which tensors are blocks, which has half
as many nodes again. One walk over both axes is what passes will use: each fact holds a placement by axis. Times are
processor time, in one process without TensorFlow, rounds interleaved.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks import bert
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import interleaved, ratio

TITLE = "a mesh of two axes beside one: BERT-base, Megatron's splits, one core"
SPLITS = {"(query|key|value)/w": [1, 2], "output/w": [2, 1], "inner/w": [1, 2], "outer/w": [2, 1]}
ONE, TWO = "two replicas", "data 2 x model 2"
PROPAGATION = (
    ("autograph_rewrite.passes.sharding.partition_model", "model_placements"),
    ("autograph_rewrite.passes.propagate", "propagate_parts"),
)
"""What finds placements: on the model axis, and of the batch."""


def config() -> dict[str, Any]:
    """Return the configuration of both axes."""
    sharding = [{"match": f".*/{name}", "split": split} for name, split in SPLITS.items()]
    return {"devices": [f"CPU:{i}" for i in range(4)], "mesh": {"data": 2, "model": 2}, "sharding": sharding}


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    layers = 1 if effort.tiny else 12
    with tempfile.TemporaryDirectory() as folder:
        call("benchmarks.bert:save", {"layers": [layers], "folder": folder, "tiny": effort.tiny}, timeout=120)
        arguments = {"file": str(Path(folder, f"{layers}.ar")), "rounds": effort.rounds(5)}
        measured = call("benchmarks.mesh:measure", arguments, timeout=600, cores=1)
    rewritten, propagated = measured["times"]["processor"], measured["propagation"]
    nodes = measured["nodes"]
    return [
        _figure("propagation on two axes / on one", propagated, 1.6),
        _figure("one walk over both axes / over one", measured["walks"], 1.5),
        _figure(f"the whole rewrite ({nodes[ONE]:,} and {nodes[TWO]:,} nodes come out)", rewritten, None),
    ], measured


def _figure(name: str, times: dict[str, list[float]], at_most: float | None) -> Figure:
    how = " / ".join(milliseconds(median(times[each])) for each in (TWO, ONE))
    return Figure(name, ratio(times[TWO], times[ONE]), at_most=at_most, how=how)


def measure(file: str, rounds: int) -> dict[str, Any]:
    """Rewrite a graph for both meshes in turn (in a child, without TensorFlow)."""
    import autograph_rewrite as ar

    item = ar.GraphItem.load(file)
    nodes: dict[str, int] = {}
    propagation: dict[str, list[float]] = {ONE: [], TWO: []}

    def rewrite(name: str, configuration: dict[str, Any]) -> None:
        spent: list[float] = []
        patches = [patch(f"{module}.{function}", _timed(module, function, spent)) for module, function in PROPAGATION]
        for each in patches:
            each.start()
        try:
            nodes[name] = ar.rewrite(item, configuration, verify_each=False).report.nodes_after
        finally:
            for each in patches:
                each.stop()
        propagation[name].append(sum(spent))

    contestants = {ONE: partial(rewrite, ONE, bert.config(2)), TWO: partial(rewrite, TWO, config())}
    times = interleaved(contestants, rounds=rounds)
    walks = interleaved({ONE: partial(walk, item, False), TWO: partial(walk, item, True)}, rounds=rounds)
    return {
        "times": times,
        "nodes": nodes,
        "walks": walks["processor"],
        "propagation": {name: each[-rounds:] for name, each in propagation.items()},
    }


def walk(item: Any, on_both: bool) -> Any:
    """Propagate the batch over a graph whose weights are whole, or else cut on a model axis of two devices."""
    from autograph_rewrite.analysis.propagate import propagate
    from autograph_rewrite.ir.mesh import MODEL, REPLICA
    from autograph_rewrite.ops.facts.placement import REPLICATED, Extent, Fact, split
    from autograph_rewrite.ops.facts.symbolic_dims import local_symbol
    from autograph_rewrite.ops.rules.base import Semantics

    graph, extent, given = item.graph, Extent(MODEL, 2, (1, 1)), {}
    for name, variable in item.variables.items() if on_both else ():
        for pattern, parts in SPLITS.items():
            if re.search(pattern, name) and len(variable.shape or ()) == len(parts):
                dim, handle = parts.index(2), graph.nodes[variable.handle].output()
                block = [local_symbol()._replace(coef=n // 2) if i == dim else n for i, n in enumerate(variable.shape)]
                seen_on_model = Fact(REPLICATED, handle.dtype, tuple(block))
                given[handle] = seen_on_model.on(REPLICA, MODEL).placed(MODEL, split(dim)._replace(extent=extent))
    batch = {graph.value(info.tensor): 0 for info in item.inputs.values() if info.shape and info.shape[0] is None}
    return propagate(graph, batch, Semantics(more=(extent,) if on_both else ()), given=given)


def _timed(module: str, function: str, spent: list[float]) -> Callable[..., Any]:
    """Return a function that also tells how long it has taken."""
    import importlib

    work = getattr(importlib.import_module(module), function)

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return work(*arguments, **named)
        finally:
            spent.append(time.process_time() - began)

    return timed
