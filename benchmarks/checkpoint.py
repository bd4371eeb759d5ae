"""What saving costs: steps of a model of 1 GB while a checkpoint of it is written beside them, and instead of them.

A window is some steps; each contestant does the same window, one of them with a save at its beginning that goes on
beside the steps (it is waited for at the end of the window), one with a save that the steps wait for.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import contestants
from benchmarks.child import call
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.timing import Times, interleaved

TITLE = "checkpoints: a model of 1 GB, a window of steps with one save"


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    width, layers, batch = (64, 2, 4) if effort.tiny else (4096, 16, 128)
    arguments = {"width": width, "layers": layers, "batch": batch, "rounds": effort.rounds(5)}
    arguments["steps"] = 2 if effort.tiny else 12
    found = call("benchmarks.checkpoint:measure", arguments, timeout=1500)
    times: Times = found["times"]
    alone, beside, waiting = (times["wall"][name] for name in ("alone", "beside", "waiting"))
    work = [times["processor"][name] for name in ("alone", "beside")]
    lost = median((b - a) / a for a, b in zip(alone, beside, strict=True))
    window = median(alone)
    said = f"{found['bytes'] / 1e9:.2f} GB, {arguments['steps']} steps in {window:.1f} s"
    figures = [
        Figure("time lost to a save beside the steps", lost * 100, "%", at_most=5.0, how=said),
        Figure("  the same", median(b - a for a, b in zip(alone, beside, strict=True)), "s"),
        Figure("  processor time of the save", median(b - a for a, b in zip(*work, strict=True)), "s"),
        Figure("  a save that the steps wait for", median(b - a for a, b in zip(alone, waiting, strict=True)), "s"),
        Figure("  the call of save()", median(found["called"]) * 1e3, "ms"),
        Figure("  restore", median(found["restored"]), "s"),
    ]
    return figures, found


def measure(width: int, layers: int, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    """Time windows of steps (in a child)."""
    contestants.split_cpu(2)
    import tensorflow as tf

    import autograph_rewrite as ar

    weights = [tf.Variable(tf.random.normal([width, width], seed=i) / width) for i in range(layers)]

    def loss_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.relu(y @ weight)
            loss = tf.reduce_mean(y**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    step = ar.distribute(loss_step, {"devices": ["CPU:0"]}, tf.TensorSpec([None, width]))
    x = tf.random.normal([batch, width], seed=1)
    folder = Path(tempfile.mkdtemp())
    net = tf.train.Checkpoint(weights=weights)
    numbers = iter(range(1, 10_000))
    called, restored = [], []

    def window(save: Callable[[], None] | None, wait: Callable[[], None] | None) -> Callable[[], None]:
        def go() -> None:
            if save is not None:
                began = time.perf_counter()
                save()
                called.append(time.perf_counter() - began)
            for _ in range(steps):
                step(x).numpy()
            if wait is not None:
                wait()

        return go

    try:
        beside = ar.CheckpointManager(net, folder / "beside", max_to_keep=1)
        waiting = ar.CheckpointManager(net, folder / "waiting", max_to_keep=1, asynchronous=False)
        ways = {
            "alone": window(None, None),
            "beside": window(lambda: beside.save(next(numbers)), beside.wait),
        }
        times = interleaved(
            {**ways, "waiting": lambda: [waiting.save(next(numbers)), *(step(x).numpy() for _ in range(steps))]},
            rounds=rounds,
        )
        for _ in range(min(rounds, 3)):
            began = time.perf_counter()
            beside.restore()
            restored.append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder)
    size = layers * width * width * 4
    return {"times": times, "called": called, "restored": restored, "bytes": size}
