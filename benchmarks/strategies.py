"""What each strategy makes of one small model: measured steps, bytes on each device, and a predicted step on two hosts.

A classifier of word ids (an embedding of 4,096 x 64, four dense layers, Adam, 64 examples of 16 ids): 413,696
parameters, of which the embedding holds two thirds. Steps run over two replicas in one process, in turn with those of
one device; the two hosts are those of the cost model, with the links that a configuration has by default.
`python -m benchmarks strategies` also keeps what the pages of the strategies show, in docs/strategy/measured.json.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import ROOT, call
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.timing import interleaved, ratio

TITLE = "the strategies on one small model, 2 replicas / one device"
KEPT = ROOT / "docs" / "strategy" / "measured.json"
PRESETS = (
    "all_reduce",
    "all_reduce_mirrored",
    "ps",
    "ps_load_balancing",
    "parallax",
    "partitioned_ps",
    "uneven_partitioned_ps",
    "partitioned_ar",
    "random_axis_partition_ar",
    "fsdp",
    "pipeline_hosts",
    "auto",
)
ONE = "one device"
BATCH, WORDS, LENGTH, WIDTH, CLASSES = 64, 4096, 16, 256, 16
SERVERS = ("ps", "ps_load_balancing", "parallax", "partitioned_ps", "uneven_partitioned_ps")


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and what they are made of; a full run keeps it for the documentation."""
    measured = call(
        "benchmarks.strategies:measure",
        {"presets": list(effort.some(PRESETS)), "rounds": effort.rounds(25), "seconds": effort.seconds(0.05)},
        timeout=500,
    )
    if not effort.tiny:
        KEPT.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return [Figure(name, one["step"]) for name, one in measured["presets"].items()], measured


def measure(presets: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the presets in turn (in a child)."""
    import tensorflow as tf

    import autograph_rewrite as ar

    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    item = ar.GraphItem.from_graph(classifier(), train_op="train", outputs=["loss"], init_op="init")
    rewritten = {name: ar.rewrite(item, ar.Config.of(settings(name))) for name in presets}
    steps = {ONE: _step(item)} | {name: _step(new) for name, new in rewritten.items()}
    times = interleaved(steps, rounds=rounds, seconds=seconds)["wall"]
    found = {name: _static(name, new, item) | _timed(times, name) for name, new in rewritten.items()}
    return {"machine": _machine(), "one_device_ms": round(median(times[ONE]) * 1e3, 2), "presets": found}


def settings(name: str) -> dict[str, Any]:
    """Return a preset as a mapping, with two devices in this process."""
    import yaml

    text = yaml.safe_load(Path(ROOT, "configs", f"{name}.yaml").read_text(encoding="utf-8"))
    return {**text, "devices": ["CPU:0", "CPU:1"]}


def classifier() -> Any:
    """Return the training graph of the classifier."""
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = tf.Graph()

    def weight(name: str, rows: int, columns: int) -> Any:
        made = v1.glorot_uniform_initializer(seed=rows + columns)
        return v1.get_variable(name, [rows, columns], initializer=made, use_resource=True)

    with graph.as_default():
        ids = v1.placeholder(tf.int32, [None, LENGTH], name="ids")
        labels = v1.placeholder(tf.int64, [None], name="labels")
        hidden = tf.reduce_mean(tf.nn.embedding_lookup(weight("embedding", WORDS, 64), ids), 1)
        for layer, rows in enumerate((64, WIDTH, WIDTH)):
            hidden = tf.nn.relu(hidden @ weight(f"dense_{layer}", rows, WIDTH))
        logits = hidden @ weight("head", WIDTH, CLASSES)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        v1.train.AdamOptimizer(1e-3).minimize(tf.reduce_mean(losses, name="loss"), name="train")
        v1.global_variables_initializer()
    return graph


def _step(item: Any) -> Any:
    """Return a call that does one step of an item, in a session of its own."""
    import numpy as np

    rng = np.random.default_rng(0)
    feeds = {"ids:0": rng.integers(0, WORDS, (BATCH, LENGTH)), "labels:0": rng.integers(0, CLASSES, BATCH)}
    session = item.session()
    session.run(item.init_op)
    return lambda: session.run(["loss", "train"], feed_dict=feeds)


def _timed(times: dict[str, list[float]], name: str) -> dict[str, float]:
    return {"step": round(ratio(times[name], times[ONE]), 2), "step_ms": round(median(times[name]) * 1e3, 2)}


def _static(name: str, new: Any, item: Any) -> dict[str, Any]:
    """Return what does not depend on the machine: nodes, bytes, and a predicted step on two hosts."""
    import autograph_rewrite as ar

    workers = {"workers": ["host-0:2222", "host-1:2222"]}
    cluster = workers | ({"ps": ["host-2:2222"]} if name in SERVERS else {})
    job = {**settings(name), "devices": ["CPU:0"], "cluster": cluster}
    job.get("strategy", {}).pop("variables", None)
    plan = ar.build_plan(item, ar.Config.of(job))
    predicted = ar.simulate(item, plan, ar.Config.of(job), batch=BATCH)
    report, devices = new.report, {node.name: node.device for node in new.graph_def.node}
    return {
        "nodes": report.nodes_after,
        "held": dict(report.held),
        "variables": {
            one.name: _placed(one, report.plan.mode, devices.get(one.name, "")) for one in report.plan.variables
        },
        "predicted_ms": round(predicted.step_seconds * 1e3, 2),
        "links": [[link.name, link.count, link.bytes] for link in predicted.links],
    }


def _placed(variable: Any, mode: str, stage: str) -> list[float]:
    """Return which share of a variable each of the two devices holds.

    Args:
        variable: as the plan has it.
        mode: whether variables are shared or mirrored.
        stage: the device of its node in the rewritten graph, which tells the stage that it belongs to.
    """
    servers = [int(server[-1]) for server in variable.servers]
    if servers and variable.sizes:
        held = [sum(size for server, size in zip(servers, variable.sizes, strict=True) if server == i) for i in (0, 1)]
        return [round(one / sum(variable.sizes), 2) for one in held]
    if servers:
        return [float(servers[0] == i) for i in (0, 1)]
    if mode == "mirrored":
        return [1.0, 1.0]
    return [float(stage.endswith("1") == bool(i)) for i in (0, 1)]


def _machine() -> str:
    import os

    import tensorflow as tf

    versions = f"Python {platform.python_version()}, TensorFlow {tf.__version__}"
    return f"{os.cpu_count()} cores of a {platform.machine()} virtual machine, {versions}"
