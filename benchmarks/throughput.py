"""How fast a graph is rewritten: from a file to the bytes of the distributed GraphDef, on one core.

BERT-base with Adam, about 13,000 nodes, over 8 replicas with mirrored variables: about 93,000 nodes come out. All times
are processor time, which on an idle machine is the time that passes. The yardstick is `tf.import_graph_def` of the
result, which whoever wants to run it has to do as well.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import bert
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import Times, fit, interleaved, ratio, spread

TITLE = "rewrite throughput: BERT-base, mirrored, one core"
LAYERS, REPLICAS = (3, 6, 12), (2, 4, 8, 16)
Case = tuple[str, int, int, bool]
"""File ending, layers, replicas, whether the graph is verified after each pass."""


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    layers = (1, 2) if effort.tiny else LAYERS
    replicas = (2, 3, 4) if effort.tiny else REPLICAS
    deep, many = layers[-1], replicas[2]
    cases: list[Case] = [("pb", deep, many, False), ("pb", deep, many, True), ("ar", deep, many, False)]
    cases += [("pb", count, many, False) for count in layers[:-1]]
    cases += [("pb", deep, count, False) for count in replicas if count != many]
    with tempfile.TemporaryDirectory() as folder:
        call("benchmarks.bert:save", {"layers": layers, "folder": folder, "tiny": effort.tiny}, timeout=120)
        arguments = {"folder": folder, "cases": cases, "rounds": effort.rounds(5)}
        measured = call("benchmarks.throughput:measure", arguments, timeout=600, cores=1)
        arguments = {"layers": deep, "replicas": many, "rounds": effort.rounds(5), "tiny": effort.tiny}
        in_tf = call("benchmarks.throughput:measure_with_tensorflow", arguments, timeout=600, cores=1)
    times = measured["times"]["processor"]
    in_tf = in_tf["processor"]
    emitted: dict[str, int] = measured["nodes"]
    base, verified, bundle = (_name(*case) for case in cases[:3])
    nodes, seconds = emitted[base], median(times[base])
    figures = [
        Figure(
            "emitted nodes per second, .pb to GraphDef bytes",
            nodes / seconds,
            "nodes/s",
            at_least=150_000,
            how=f"{nodes:,} nodes in {milliseconds(seconds)} (spread {spread(times[base]):.0%})",
        ),
        Figure("  the same from our own .ar file", nodes / median(times[bundle]), "nodes/s"),
        Figure(
            "  tf.Graph to TensorFlow's GraphDef message",
            nodes / median(in_tf["rewrite"]),
            "nodes/s",
            how=f"{milliseconds(median(in_tf['rewrite']))}, encoding and parsing in TensorFlow included",
        ),
        Figure(
            "time with verification after each pass / without",
            ratio(times[verified], times[base]),
            at_most=2.0,
            how=f"{milliseconds(median(times[verified]))} / {milliseconds(seconds)}",
        ),
        Figure(
            "tf.import_graph_def of the result / load and rewrite",
            median(in_tf["import"]) / seconds,
            at_least=8.0,
            how=f"{milliseconds(median(in_tf['import']))} / {milliseconds(seconds)}",
        ),
        _scaling("nodes", [("pb", count, many, False) for count in layers], measured, many),
        _scaling("replicas", [("pb", deep, count, False) for count in replicas], measured, None),
    ]
    return figures, {
        "times": measured["times"],
        "nodes": emitted,
        "passes": measured["passes"],
        "with_tensorflow": in_tf,
    }


def _name(kind: str, layers: int, replicas: int, verify: bool) -> str:
    return f"{kind}, {layers} layers, {replicas} replicas{', verified' if verify else ''}"


def _scaling(what: str, cases: list[Case], measured: dict[str, Any], replicas: int | None) -> Figure:
    """Return how time grows with the emitted nodes: in proportion, or less."""
    names = [_name(*case) for case in cases]
    sizes = [measured["nodes"][name] for name in names]
    times = [median(measured["times"]["processor"][name]) for name in names]
    line = fit(sizes, times)
    listed = ", ".join(milliseconds(seconds) for seconds in times)
    where = f"{cases[0][1]} to {cases[-1][1]} layers" if replicas else f"{cases[0][2]} to {cases[-1][2]} replicas"
    return Figure(
        f"growth with {what}: exponent of time over emitted nodes",
        line.exponent,
        "",
        at_most=1.15,  # larger graphs fit the caches less well
        how=f"{where}: {listed}; line of {line.slope * 1e6:.2g} us per node + {milliseconds(line.intercept)}, "
        f"R^2 = {line.r_squared:.3f}",
    )


def measure(folder: str, cases: list[Case], rounds: int) -> dict[str, Any]:
    """Load and rewrite each case, round by round (in a child, without TensorFlow)."""
    import autograph_rewrite as ar

    nodes: dict[str, int] = {}
    passes: dict[str, dict[str, float]] = {}

    def rewrite(kind: str, layers: int, replicas: int, verify: bool) -> None:
        named = bert.NAMES if kind == "pb" else {}
        item = ar.GraphItem.load(Path(folder, f"{layers}.{kind}"), **named)
        new = ar.rewrite(item, bert.config(replicas), verify_each=verify)
        assert new.graph_bytes
        name = _name(kind, layers, replicas, verify)
        nodes[name] = new.report.nodes_after
        passes[name] = {record.name: record.seconds for record in new.report.passes}

    contestants = {_name(*case): partial(rewrite, *case) for case in cases}
    times = interleaved(contestants, rounds=rounds, warm_up=min(1, rounds - 1))
    return {"times": times, "nodes": nodes, "passes": passes}


def measure_with_tensorflow(layers: int, replicas: int, rounds: int, tiny: bool) -> Times:
    """Rewrite a tf.Graph to TensorFlow's GraphDef message, and import that (in a child)."""
    import tensorflow as tf

    import autograph_rewrite as ar

    graph = bert.build(layers, tiny=tiny)

    def rewrite() -> Any:
        item = ar.GraphItem.from_graph(graph, **bert.NAMES)
        return ar.rewrite(item, bert.config(replicas), verify_each=False).graph_def

    message = rewrite()

    def load() -> None:
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(message, name="")

    return interleaved({"rewrite": rewrite, "import": load}, rounds=rounds, warm_up=0)
