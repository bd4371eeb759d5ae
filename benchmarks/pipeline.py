"""Two stages in two processes, each on a core of its own, against one process on one core with the same micro-batches.

speed-up   one process / two stages; at best M * S / (M + S - 1), if both stages take equally long
balance    each half of the model by itself: a pipeline is as fast as its slower stage
machine    two independent copies of the work at the same time: cores share memory and caches
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import call
from benchmarks.dist import free_ports, pin
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds

TITLE = "two stages in two processes, pinned to a core each"
STAGES = 2
SHARE = 0.8


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    common = {"tiny": effort.tiny, "rounds": effort.rounds(7)}
    figures, details = [], {}
    for micro in (2,) if effort.tiny else (2, 4, 8):
        found = _measure(common | {"micro": micro})
        details[str(micro)] = found
        ideal = micro * STAGES / (micro + STAGES - 1)
        balance = (found["first"] + found["second"]) / (STAGES * max(found["first"], found["second"]))
        machine = found["alone"] / found["together"]
        speed_up = found["alone"] / found["two"]
        times = f"{milliseconds(found['alone'])} / {milliseconds(found['two'])}"
        how = f"{times}; at best {ideal:.2f}, of which it is {speed_up / ideal:.2f}"
        figures.append(Figure(f"{micro} micro-batches: one process / two stages", speed_up, how=how))
        how = f"of {ideal:.2f} x balance {balance:.2f} x what the machine gives two copies {machine:.2f}"
        target = SHARE if micro == 8 else None
        figures.append(
            Figure("  share of what can be had", speed_up / (ideal * balance * machine), "", None, target, how)
        )
    return figures, details


def _measure(common: dict[str, Any]) -> dict[str, float]:
    def alone(part: str, core: int = 0) -> float:
        return float(call("benchmarks.pipeline:one", {**common, "part": part, "core": core}, timeout=300))

    found = {"alone": alone("whole"), "first": alone("first"), "second": alone("second")}
    with ThreadPoolExecutor(2) as pool:  # the best of some tries: other programs take cores, too
        tries = [max(pool.map(lambda core: alone("whole", core), range(2))) for _ in range(1 if common["tiny"] else 3)]
        found["together"] = min(tries)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        told = {"ports": free_ports(2), "stop": str(Path(folder) / "stop")}
        serving = pool.submit(call, "benchmarks.pipeline:serve", told, timeout=300)
        try:
            found["two"] = float(call("benchmarks.pipeline:two", {**common, "ports": told["ports"]}, timeout=300))
        finally:
            Path(told["stop"]).touch()
        serving.result()
    found["alone"] = min(found["alone"], alone("whole"))  # whatever else the machine did meanwhile
    return found


def _item(tiny: bool, part: str) -> Any:
    """Return a perceptron of eight layers, or the first or second half of it."""
    import numpy as np
    import tensorflow as tf

    import autograph_rewrite as ar

    v1, width = tf.compat.v1, 16 if tiny else 512
    graph = tf.Graph()
    with graph.as_default():
        h = v1.placeholder(tf.float32, (None, width), name="x")
        for layer in {"whole": range(8), "first": range(4), "second": range(4, 8)}[part]:
            initial = np.random.default_rng(layer).normal(size=(width, width), scale=width**-0.5)
            w = v1.get_variable(f"w{layer}", initializer=initial.astype(np.float32), use_resource=True)
            h = tf.tanh(h @ w, name=f"h{layer}")
        loss = tf.reduce_mean(h**2, name="loss")
        v1.train.GradientDescentOptimizer(0.01).minimize(loss, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def _examples(tiny: bool) -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=(16, 16) if tiny else (1024, 512)).astype(np.float32)


def one(tiny: bool, rounds: int, micro: int, part: str, core: int) -> float:
    """Time a step of the model, or of half of it, in one process."""
    pin(core)
    import autograph_rewrite as ar

    new = ar.rewrite(_item(tiny, part), {"devices": ["CPU:0"], "microbatches": micro})
    with new.session() as session:
        session.run("init")
        return _time(session, _examples(tiny), rounds)


def two(tiny: bool, rounds: int, micro: int, ports: list[int]) -> float:
    """Time a step of two stages, of which this process has the first."""
    pin(0)
    import autograph_rewrite as ar

    _server(ports, 0)
    devices = [f"/job:worker/task:{task}/device:CPU:0" for task in range(STAGES)]
    pipeline = {"stages": STAGES, "microbatches": micro, "boundaries": ["h3"], "devices": devices}
    new = ar.rewrite(_item(tiny, "whole"), {"devices": ["CPU:0"], "pipeline": pipeline})
    with new.session(f"grpc://127.0.0.1:{ports[0]}") as session:
        session.run("init")
        return _time(session, _examples(tiny), rounds)


def serve(ports: list[int], stop: str) -> None:
    """Be the second stage until a file appears."""
    pin(1)
    server = _server(ports, 1)
    while not os.path.exists(stop):
        time.sleep(0.05)
    del server


def _server(ports: list[int], task: int) -> Any:
    import tensorflow as tf

    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    return tf.distribute.Server(cluster, job_name="worker", task_index=task)


def _time(session: Any, x: Any, rounds: int) -> float:
    """Return the median over rounds of the seconds of one step."""
    found = []
    for i in range(rounds + 3):
        began = time.perf_counter()
        session.run("train", {"x": x})
        if i >= 3:
            found.append(time.perf_counter() - began)
    return median(found)
