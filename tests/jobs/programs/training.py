"""A worker that trains for a while, and writes its weights at the end: `training.py MODE OUT`.

MODE is session, function or keras; fit and loop keep checkpoints, and begin where the last one ended. Without TF_CONFIG
one process trains on everything, for comparison.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.runtime.job.tf_server import Meetings
from tests.jobs.programs import models
from tests.jobs.programs.job import Array, Job
from tests.zoo import ZOO

STEPS, EPOCHS = 40, 6
PAUSE = float(os.environ.get("JOB_PAUSE", "0.02"))
KILLED = os.environ.get("JOB_KILLED", "")
"""task:step of who kills itself, comma-separated: one for each start of the job."""
Weights = Mapping[str, Array]


def config(job: Job) -> Mapping[str, Any]:
    """Return the configuration."""
    return {**job.config(), "timeout_seconds": float(os.environ.get("JOB_TIMEOUT", "5"))}


def did(job: Job, step: int) -> None:
    """Say that a step is done; die if it is time to."""
    print(f"did step {step}", flush=True)
    time.sleep(PAUSE)
    plan = KILLED.split(",")[int(os.environ.get("AUTOGRAPH_RESTART", "0")) :]
    if plan and plan[0] == f"{job.task}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def session(job: Job) -> Weights:
    """Train a v1 graph."""
    built = ZOO["mlp"].build(optimizer="adam")
    item = GraphItem.from_graph(
        built.graph, train_op=built.train_op, outputs=["loss"], init_op="init", batch_inputs=dict(built.batch_inputs)
    )
    with (ar.rewrite(item, config(job)) if job.is_rewritten else item).session() as opened:
        opened.run("init")
        for step in range(STEPS):
            opened.run(["loss", "train"], {name: job.part(v) for name, v in built.feeds(step, 8).items()})
            did(job, step)
        return opened.read_variables()


def function(job: Job) -> Weights:
    """Train a function."""
    built, step_function = stepping(job)
    for step in range(STEPS):
        step_function(*(tf.constant(job.part(value)) for value in built.feeds(step, 8)))
        did(job, step)
    return {name: np.asarray(v) for name, v in built.variables.items()}


def stepping(job: Job) -> tuple[Any, Any]:
    """Return a function's description and the function."""
    built = ZOO["custom_loop"].build(optimizer="adam")
    if not job.is_rewritten:
        return built, tf.function(built.step, input_signature=built.specs)
    return built, ar.distribute(built.step, config(job), *built.specs, batch_inputs=dict(built.batch_inputs))


class Telling(keras.callbacks.Callback):
    """Tells of every batch."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell."""
        did(self._job, 6 * self._epoch + batch)


def keras_model(job: Job) -> Weights:
    """Fit a model."""
    return fitted(job, [])


def fit(job: Job) -> Weights:
    """Fit a model with BackupAndRestore."""
    return fitted(job, [keras.callbacks.BackupAndRestore(str(job.folder / "backup"))])


def fitted(job: Job, callbacks: list[Any]) -> Weights:
    """Fit a model: six batches per epoch, the last one shorter."""
    model = models.small("adam")
    model.get_layer("dropout").rate = 0.0  # Keras does not save how far its random numbers have come
    if job.is_rewritten:
        model = ar.distribute(model, config(job))
    x, y = models.examples(45)
    model.fit(x, y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[*callbacks, Telling(job)])
    return {v.path: np.asarray(v.value) for v in model.variables}


def loop(job: Job) -> Weights:
    """Run a loop of one's own, in which worker 0 writes a tf.train.Checkpoint every six steps, and all restore it."""
    built, step_function = stepping(job)
    done = tf.Variable(0, dtype=tf.int64, name="done")
    checkpoint = tf.train.Checkpoint(done=done, **{name.replace("/", "_"): v for name, v in built.variables.items()})
    manager = tf.train.CheckpointManager(checkpoint, str(job.folder / "checkpoints"), max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint)
    for step in range(int(done), STEPS):
        step_function(*(tf.constant(job.part(value)) for value in built.feeds(step, 8)))
        did(job, step)
        done.assign(step + 1)
        if job.is_chief and step % 6 == 5:
            manager.save()
    return {name: np.asarray(v) for name, v in built.variables.items()}


def disturb_between(job: Job, moment: str, number: int) -> None:
    """Send worker 0 a signal in the moment that it has answered, or that this worker's session is open."""

    def send() -> None:
        pid = int((job.folder / "0.pid").read_text())
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(0.2)  # until its port is closed

    def then_send(act: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **more: Any) -> Any:
            result = act(*args, **more)
            send()
            return result

        return both

    if moment == "met":
        Meetings.meet = then_send(Meetings.meet)  # type: ignore[method-assign]
    else:
        GraphItem.session = then_send(GraphItem.session)  # type: ignore[method-assign]


MODES = {"session": session, "function": function, "keras": keras_model, "fit": fit, "loop": loop}


def main(mode: str, out: Path) -> None:
    """Train, and write the weights, whole or not at all."""
    job = Job.here(out)
    server = "ps" if '"type": "ps"' in os.environ.get("TF_CONFIG", "") else ""
    (out / f"{server}{job.task}.pid").write_text(str(os.getpid()))
    print("begins", flush=True)
    if os.environ.get("JOB_STOPS"):  # its server listens, and answers nobody
        ar.join()
        tf.constant(1.0) + 1.0
        os.kill(os.getpid(), signal.SIGSTOP)
    if os.environ.get("JOB_DISTURBS") and not job.is_chief:
        moment, _, number = os.environ["JOB_DISTURBS"].partition(":")
        disturb_between(job, moment, int(number))
    weights = MODES[mode](job)
    name = f"worker{job.task}" if job.is_rewritten else "single"
    np.savez(out / f"{name}.part.npz", **{key.replace("/", "|"): value for key, value in weights.items()})
    (out / f"{name}.part.npz").rename(out / f"{name}.npz")
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
