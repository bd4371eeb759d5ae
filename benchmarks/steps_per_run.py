"""Several steps per run: what a step costs beyond its own compute, alone and in a loop of fifty; the speed of a fit.

T(1), T(10), T(50)      compute of a step = (T(50) - T(10)) / 40
overhead of a step      T(1) - compute       against       T(50) / 50 - compute
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import Times, interleaved, ratio

TITLE = "steps_per_run: 50, two replicas on virtual CPU devices"
STEPS, FEW, BATCH, WIDTH, CLASSES = 50, 10, 32, 64, 10
MODES = ("shared", "mirrored")
Runs = dict[str, Callable[[], object]]


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for how in ("function", "session"):
        for mode in effort.some(MODES):
            arguments = {"how": how, "mode": mode, "rounds": effort.rounds(15)}
            times: Times = call("benchmarks.steps_per_run:measure", arguments, timeout=180)
            figures.append(_overhead(f"{how}, {mode}", times))
            details[f"{how} {mode}"] = times
    arguments = {"rounds": effort.rounds(7), "batches": 2 * STEPS if effort.tiny else 8 * STEPS}
    fits: Times = call("benchmarks.steps_per_run:fits", arguments, timeout=300)
    details["fit"] = fits
    return [*figures, *_of_fits(fits["wall"])], details


def _overhead(name: str, times: Times) -> Figure:
    wall = times["wall"]
    single, fifty, few = (min(wall[key]) for key in ("single", "fifty", "few"))
    compute = (fifty - few) / (STEPS - FEW)
    alone, together = single - compute, fifty / STEPS - compute
    return Figure(
        f"{name}: overhead of a step in a loop of {STEPS} / of a single step",
        max(0.0, together) / alone if alone > 0 else 1.0,
        at_most=0.2,
        how=f"fastest rounds: single {milliseconds(single)}, in the loop {milliseconds(fifty / STEPS)}, "
        f"compute {milliseconds(compute)}",
    )


def _of_fits(wall: dict[str, list[float]]) -> list[Figure]:
    shown = ", ".join(f"{name} {milliseconds(median(values))}" for name, values in wall.items())
    return [
        Figure(
            "fit of an MLP on batches that are ready: steps per second with 50 / with 1",
            ratio(wall["ready single"], wall["ready fifty"]),
            at_least=3,
            how=shown,
        ),
        Figure("fit of an MLP on arrays: steps per second with 50 / with 1", ratio(wall["single"], wall["fifty"])),
        Figure(
            "fit of an MLP on arrays, mirrored: steps per second with 50 / with 1",
            ratio(wall["mirrored single"], wall["mirrored fifty"]),
        ),
        Figure(
            "fit of an MLP on arrays: time of a step / that of the original with steps_per_execution=50",
            ratio(wall["fifty"], wall["original fifty"]),
            how="the original runs on one device; both wait for Keras' input pipeline",
        ),
    ]


def measure(how: str, mode: str, rounds: int) -> Times:
    """Time one step, and runs of few and of many (in a child)."""
    contestants.split_cpu(2)
    made = _functions(mode) if how == "function" else _sessions(mode)
    return interleaved(made, rounds=rounds, seconds=0.05, warm_up=3)


def _config(mode: str, steps: int) -> dict[str, Any]:
    return {"devices": ["CPU:0", "CPU:1"], "strategy": {"variables": mode}, "steps_per_run": steps}


def _data() -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
    return x, rng.integers(0, CLASSES, (STEPS, BATCH))


def _loss(weights: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    logits = tf.nn.relu(x @ weights[0]) @ weights[1]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def _functions(mode: str) -> Runs:
    import tensorflow as tf

    import autograph_rewrite as ar

    x, y = map(tf.constant, _data())

    def made(steps: int) -> Any:
        shapes = (WIDTH, WIDTH), (WIDTH, CLASSES)
        weights = [tf.Variable(tf.random.stateless_normal(shape, [0, 1])) for shape in shapes]

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(weights, x, y)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.01 * gradient)
            return loss

        return ar.distribute(step, _config(mode, steps))

    one, several = made(1), made(STEPS)
    first = x[0], y[0]
    return {
        "single": lambda: one(*first).numpy(),
        "few": lambda: several(x[:FEW], y[:FEW]).numpy(),
        "fifty": lambda: several(x, y).numpy(),
    }


def _sessions(mode: str) -> Runs:
    import tensorflow as tf

    import autograph_rewrite as ar

    x, y = _data()
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        fed = v1.placeholder(tf.float32, [None, WIDTH], "x"), v1.placeholder(tf.int64, [None], "y")
        weights = [
            v1.get_variable(name, shape, initializer=v1.glorot_normal_initializer(1), use_resource=True)
            for name, shape in (("w", (WIDTH, WIDTH)), ("head", (WIDTH, CLASSES)))
        ]
        loss = tf.identity(_loss(weights, *fed), name="loss")
        v1.train.GradientDescentOptimizer(0.01).minimize(loss, name="train")
        v1.group(v1.global_variables_initializer(), name="init")
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")

    def made(steps: int) -> Any:
        session = ar.rewrite(item, _config(mode, steps)).session()
        session.run("init")
        return session

    one, several = made(1), made(STEPS)
    return {
        "single": lambda: one.run(["loss", "train"], {"x": x[0], "y": y[0]}),
        "few": lambda: several.run(["loss", "train"], {"x": x[:FEW], "y": y[:FEW]}),
        "fifty": lambda: several.run(["loss", "train"], {"x": x, "y": y}),
    }


def fits(rounds: int, batches: int) -> Times:
    """Time a step of an epoch of `fit` in several ways (in a child)."""
    contestants.split_cpu(2)
    import keras
    import numpy as np
    import tensorflow as tf

    import autograph_rewrite as ar

    rng = np.random.default_rng(0)
    x = rng.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))

    def made(steps: int, mode: str) -> Any:
        hidden = keras.layers.Dense(WIDTH, activation="relu")
        model = keras.Sequential([keras.layers.Input((WIDTH,)), hidden, keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=1 if mode else steps)
        return ar.distribute(model, _config(mode, steps)) if mode else model

    models = {
        "original": made(1, ""),
        "original fifty": made(STEPS, ""),
        "single": made(1, "shared"),
        "fifty": made(STEPS, "shared"),
        "mirrored single": made(1, "mirrored"),
        "mirrored fifty": made(STEPS, "mirrored"),
        "ready single": made(1, "shared"),
        "ready fifty": made(STEPS, "shared"),
    }
    ready = tf.data.Dataset.from_tensors((x[:BATCH], y[:BATCH])).repeat(batches)
    times: Times = {"wall": {name: [] for name in models}, "processor": {name: [] for name in models}}
    for round_ in range(rounds + 1):
        for name, model in models.items():
            wall, processor = time.perf_counter(), time.process_time()
            if name.startswith("ready"):
                model.fit(ready, verbose=0)
            else:
                model.fit(x, y, batch_size=BATCH, verbose=0)
            if round_:  # the first one traces
                times["wall"][name].append((time.perf_counter() - wall) / batches)
                times["processor"][name].append((time.process_time() - processor) / batches)
    return times
