"""Two processes, each on a core of its own: what an exchange costs, what buckets and compressors save.

gradients   1, 50 and 200 of 1,000 numbers each, one collective each or in buckets
step        a network over two processes, against one process on one core with the same total batch
digests     steps in which all that workers have to be given alike is compared, against steps in which it is not
link        the same with 100 Mbit/s between the processes, plain and compressed
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.link import Link, passed

TITLE = "two processes, pinned to a core each"
MEGABITS = 100
NUMBERS = 1000
CALLS = 5
COMPRESSORS = ("none", "fp16", "topk", "powersgd")


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    rounds, counts = effort.rounds(7), (1, 4) if effort.tiny else (1, 50, 200)
    common = {"tiny": effort.tiny, "rounds": rounds}
    exchanged = _job("gradients", {"counts": counts, "rounds": rounds})
    two = _job("step", common)
    one = call("benchmarks.dist:step", {**common, "core": 0}, timeout=300)
    compared = _job("digests", common)
    kinds = COMPRESSORS[:2] if effort.tiny else COMPRESSORS
    slow = {kind: _job("step", {**common, "compressor": kind}, MEGABITS * 1e6) for kind in kinds}

    figures = []
    for count in counts:
        apart, together = (exchanged[f"{count} {how}"] for how in ("apart", "in buckets"))
        figures.append(
            Figure(
                f"{count} gradients: one collective each / in buckets",
                apart / together,
                at_least=8.0 if count == 200 else None,
                how=f"{milliseconds(apart)} / {milliseconds(together)} per step",
            )
        )
    how = f"{milliseconds(two['seconds'])} / {milliseconds(one['seconds'])}, the same batch in all"
    figures.append(Figure("step of an MLP: two processes / one", two["seconds"] / one["seconds"], how=how))
    for what, found in compared.items():
        how = f"{milliseconds(found['with'])} / {milliseconds(found['without'])}"
        figures.append(Figure(f"{what}: compared in every step / not", found["ratio"], at_most=1.05, how=how))
    for kind, found in slow.items():
        ratio = found["seconds"] / slow["none"]["seconds"]
        sent = (
            f"{found['planned'] / 1e6:.3g} MB per worker and step by the plan, {found['passed'] / 1e6:.3g} MB measured"
        )
        how = f"{milliseconds(found['seconds'])}; {sent}"
        figures.append(Figure(f"the same, {MEGABITS} Mbit/s: {kind} / plain", ratio, how=how))
    return figures, {"gradients": exchanged, "two": two, "one": one, "compared": compared, "slow": slow}


def _job(what: str, arguments: Mapping[str, Any], bits_per_second: float = 0.0) -> Any:
    """Run a function of this module in two processes as one job; return what worker 0 returns.

    With a rate, each finds the other behind a link of that rate.
    """
    ports = free_ports(2)
    links = [Link(port, bits_per_second) for port in ports] if bits_per_second else []
    meters = {"meters": [link.meter for link in links]} if links else {}

    def start(task: int) -> Any:
        seen = [port if task == other or not links else links[other].port for other, port in enumerate(ports)]
        told = environments({"worker": [f"127.0.0.1:{port}" for port in seen]})[task]
        own = {**arguments, **meters, "core": task}
        return call(f"benchmarks.dist:{what}", own, timeout=400, environment=told)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(start, range(2)))
    for link in links:
        link.close()
    return results[0]


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens at."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in held]
    for listener in held:
        listener.close()
    return ports


def free_addresses(count: int) -> list[str]:
    """Return addresses of this machine at which nobody listens."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def environments(cluster: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return what the environment tells each process of a job, job by job in the order of `cluster`.

    Args:
        cluster: addresses by job ("worker", "ps", "chief").
    """
    tasks = [{"type": job, "index": index} for job, addresses in cluster.items() for index in range(len(addresses))]
    return [{"TF_CONFIG": json.dumps({"cluster": dict(cluster), "task": task})} for task in tasks]


def gradients(counts: Sequence[int], rounds: int, core: int) -> dict[str, float]:
    """Time steps that exchange many small gradients and do next to nothing else (in both processes)."""
    pin(core)
    import tensorflow as tf

    import autograph_rewrite as ar

    x = tf.ones([4, NUMBERS])
    times = {}
    for count in counts:
        for how, size in (("apart", 0), ("in buckets", 4 << 20)):
            strategy = {"name": "AllReduce", "bucket_bytes": size}
            train = _sum_of_layers([tf.Variable(tf.zeros([NUMBERS])) for _ in range(count)])
            step = ar.distribute(train, {"devices": ["CPU:0"], "strategy": strategy})
            times[f"{count} {how}"] = _time(lambda step=step: step(x), rounds)
    return times


def _sum_of_layers(weights: Sequence[Any]) -> Callable[[Any], Any]:
    """Return a training step in which each weight has a gradient of its own."""
    import tensorflow as tf

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.linalg.matvec(x, w)) for w in weights])
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.01 * g)
        return loss

    return train


def step(tiny: bool, rounds: int, core: int, compressor: str = "none", meters: Sequence[int] = ()) -> dict[str, float]:
    """Time a training step of an MLP; as one of two processes, with half of the batch."""
    pin(core)
    import tensorflow as tf

    import autograph_rewrite as ar
    from benchmarks import programs

    program = programs.build("mlp", tiny=tiny)
    train, half = programs.single_step(program), len(program.y) // 2
    x, y = tf.constant(program.x), tf.constant(program.y)
    if "TF_CONFIG" not in os.environ:
        function = tf.function(train)
        return {"seconds": _time(lambda: function(x, y), rounds)}
    part = slice(0, half) if core == 0 else slice(half, None)
    config = {"devices": ["CPU:0"], "strategy": {"name": "AllReduce", "compressor": compressor}}
    distributed = ar.distribute(train, config)
    x, y = x[part], y[part]
    distributed(x, y)
    before = sum(map(passed, meters))
    seconds = _time(lambda: distributed(x, y), rounds, warm_up=0)
    sent = (sum(map(passed, meters)) - before) / (2 * CALLS * rounds)
    planned = sum(edge.bytes for edge in distributed.items[0].report.edges if edge.is_collective)
    return {"seconds": seconds, "passed": sent, "planned": planned}


def digests(tiny: bool, rounds: int, core: int) -> dict[str, dict[str, float]]:
    """Time steps with and without the comparison of what workers are given, in turn."""
    pin(core)
    import autograph_rewrite  # noqa: F401  joins the job
    from benchmarks import programs

    makers = {
        "step of an MLP": lambda: _mlp_step(programs.build("mlp", tiny=tiny), core),
        f"{4 if tiny else 200} small variables and a fed rate": lambda: _many_variables(4 if tiny else 200),
        "Keras, a batch of images": lambda: _keras_step(8 if tiny else 64),
    }
    return {what: _with_and_without(make, rounds) for what, make in makers.items()}


def _with_and_without(make: Callable[[], Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the seconds of a step with and without the comparison, and the median of the ratios."""
    from unittest import mock

    class Nothing:
        """Compares nothing."""

        def __init__(self, *_: Any) -> None: ...

        def start(self, *_: Any) -> None: ...

        def problem(self, **_: Any) -> None: ...

    both = {"with": make()}
    both["with"]()  # traced and rewritten now
    with (
        mock.patch("autograph_rewrite.passes.pass_pipeline.digest_names", return_value=None),
        mock.patch("autograph_rewrite.runtime.keras_workers.Beside", Nothing),
    ):
        both["without"] = make()
        both["without"]()
    found: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds):
        for name in sorted(both, reverse=bool(number % 2)):
            found[name].append(_time(both[name], 1, warm_up=2))
    ratio = median(a / b for a, b in zip(found["with"], found["without"], strict=True))
    return {**{name: median(times) for name, times in found.items()}, "ratio": ratio}


def _mlp_step(program: Any, core: int) -> Callable[[], Any]:
    import tensorflow as tf

    import autograph_rewrite as ar
    from benchmarks import programs

    half = len(program.y) // 2
    part = slice(0, half) if core == 0 else slice(half, None)
    x, y = tf.constant(program.x[part]), tf.constant(program.y[part])
    distributed = ar.distribute(programs.single_step(program), {"devices": ["CPU:0"]})
    return lambda: distributed(x, y)


def _many_variables(count: int) -> Callable[[], Any]:
    import tensorflow as tf

    import autograph_rewrite as ar

    weights = [tf.Variable(tf.zeros([NUMBERS])) for _ in range(count)]

    def train(x: Any, rate: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.linalg.matvec(x, w)) for w in weights])
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(rate * g)
        return loss

    x, rate = tf.ones([4, NUMBERS]), tf.constant(0.01)
    distributed = ar.distribute(train, {"devices": ["CPU:0"]}, batch_inputs={"x": 0})
    return lambda: distributed(x, rate)


def _keras_step(batch: int) -> Callable[[], Any]:
    import keras
    import numpy as np

    import autograph_rewrite as ar

    layers = keras.layers
    body = [layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *body])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model = ar.distribute(model, {"devices": ["CPU:0"]})
    x = np.random.default_rng(0).normal(size=(batch, 32, 32, 3)).astype("float32")
    y = np.zeros(batch, "int64")
    return lambda: model.train_on_batch(x, y)


def _time(run: Callable[[], Any], rounds: int, warm_up: int = 3) -> float:
    """Return the median over rounds of the seconds of one call; both processes do the same number."""
    for _ in range(warm_up):
        run()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - began) / CALLS)
    return median(found)


def pin(core: int) -> None:
    """Run this process on one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
