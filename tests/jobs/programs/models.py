"""Keras mode: compiled models that several processes fit, all given the same data unless a case says otherwise."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.load.keras_library import path_of
from tests.jobs.programs.job import Array, Case, Job, Results
from tests.support.chosen_keras import keras
from tests.zoo import KERAS_OPTIMIZERS, ZOO
from tests.zoo.data import initial
from tests.zoo.oracle import model_variables

OWN = "own "
"""Begins the names of results that differ between workers."""


SMALL = "small"


def small(optimizer: str) -> Any:
    """Return a classifier that is traced quickly."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, "tanh", name="hidden"),
            layers.Dropout(0.2, seed=5, name="dropout"),
            layers.Dense(3, name="logits"),
        ],
        name="small",
    )
    for weight in model.trainable_variables:
        weight.assign(initial(7, path_of(weight), weight.shape, 0.3, 0.0, "float32"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    model.compile(KERAS_OPTIMIZERS[optimizer](), loss, metrics=metrics, jit_compile=False)
    return model


def built(job: Job, name: str = SMALL, optimizer: str = "adam", mode: str = "mirrored", **config: Any) -> Any:
    """Return a model, distributed where there are several workers."""
    model = small(optimizer) if name == SMALL else ZOO[name].build(optimizer=optimizer, dtype="float32").model
    if job.is_rewritten:
        model = ar.distribute(model, job.config(mode, **config))
    keras.utils.set_random_seed(3)
    return model


def data(job: Job, name: str = SMALL, count: int = 45) -> tuple[Any, Any]:
    """Return examples; a process that does not know of the others has its part only."""
    x, y = examples(count) if name == SMALL else ZOO[name].build(dtype="float32").feeds(0, count)
    return tf.nest.map_structure(job.part, (x, y)) if job.alone else (x, y)


def examples(count: int) -> tuple[Array, Array]:
    """Return examples for the small model."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)).astype(np.float32), rng.integers(0, 3, count)


def results_of(model: Any, **more: Any) -> Results:
    """Return the variables of a model, and what else there is."""
    # Keras numbers the optimizers of a process: "optimizer/adam_1/iteration".
    everything = {
        re.sub(r"_\d+/(?=iteration|learning_rate)", "/", name): v for name, v in model_variables(model).items()
    }
    found = {f"variable {name}": value for name, value in everything.items() if "metric/" not in name}
    return found | {name: np.asarray(value) for name, value in more.items()}


def history(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Fit a model and return its history."""
    found: dict[str, Any] = model.fit(*args, verbose=0, **kwargs).history
    return found


def fit(job: Job) -> Results:
    """Fit with dropout, clipping, metrics, shuffling, validation and an uneven last batch."""
    model, (x, y) = built(job, "keras_cnn"), data(job, "keras_cnn")
    losses = history(model, x, y, batch_size=16, epochs=2, validation_data=(x[:13], y[:13]))
    evaluated = model.evaluate(x, y, batch_size=16, verbose=0)
    predicted = model.predict(x[:11], batch_size=4, verbose=0)
    return results_of(model, evaluated=evaluated, predicted=predicted, **losses)


def weighted(job: Job) -> Results:
    """Give examples weights, and then classes, which makes another graph of the same model."""
    model, (x, y) = built(job, mode="shared"), data(job)
    weights = np.linspace(0, 2, 45, dtype=np.float32)[: len(y)]
    first = history(model, x, y, batch_size=8, sample_weight=weights, shuffle=False)
    second = history(model, x, y, batch_size=8, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, shuffle=False)
    return results_of(model, first=first["loss"], second=second["loss"])


def dataset(job: Job) -> Results:
    """Fit a model with two inputs and an embedding on a tf.data pipeline of dicts, two steps per execution."""
    model, (x, y) = built(job, "keras_two_inputs", "adagrad"), data(job, "keras_two_inputs", 22)
    model.steps_per_execution = 2
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    losses = history(model, pipeline, epochs=2, validation_data=pipeline.take(2))
    return results_of(model, predicted=model.predict(pipeline.map(lambda x, y: x), verbose=0), **losses)


def two_inputs(job: Job) -> Results:
    """Fit a model with a dense part and an embedding."""
    model, (x, y) = built(job, "keras_two_inputs"), data(job, "keras_two_inputs", 22)
    return results_of(model, **history(model, x, y, batch_size=5, epochs=2, shuffle=False))


def on_batch(job: Job) -> Results:
    """Train, test and predict on single batches, down to one example."""
    model = built(job, optimizer="sgd")
    x, y = data(job, count=10)
    sizes = (7, 2, 1)
    trained = [model.train_on_batch(x[:size], y[:size]) for size in sizes]
    tested = [model.test_on_batch(x[-size:], y[-size:]) for size in sizes]
    return results_of(model, trained=trained, tested=tested, predicted=model.predict_on_batch(x[:3]))


def recompiled(job: Job) -> Results:
    """Fit, compile with another optimizer, freeze a layer, and fit again."""
    model, (x, y) = built(job), data(job)
    first = history(model, x, y, batch_size=16)
    model.get_layer("hidden").trainable = False
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    second = history(model, x, y, batch_size=16)
    return results_of(model, first=first["loss"], second=second["loss"])


def per_worker(job: Job) -> Results:
    """Give each worker data of its own; the batch of a step is what all hold together."""
    model = built(job, input="per_worker")
    x, y = examples(40)
    counts = [16, 16, 8]  # examples of each batch of all workers together

    def batches() -> Iterator[tuple[Array, Array]]:
        at = 0
        for count in counts:
            here = slice(at, at + count)
            yield (job.part(x[here]), job.part(y[here])) if job.count > 1 else (x[here], y[here])
            at += count

    losses = history(model, batches(), steps_per_epoch=3, epochs=1)
    return results_of(model, **losses)


class Rates(keras.callbacks.Callback):
    """Notes the learning rate that each batch was trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Look at the optimizer."""
        self.seen.append(float(self.model.optimizer.learning_rate))


def callbacks(job: Job) -> Results:
    """Let callbacks change the learning rate, stop early, and write checkpoints, of which only worker 0's count."""
    own = job.folder / f"of_{job.task}_{job.alone}"
    model, (x, y) = built(job), data(job)
    rates = Rates()
    used = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate),
        keras.callbacks.ModelCheckpoint(str(own / "best.weights.h5"), save_weights_only=True),
        keras.callbacks.ModelCheckpoint(str(own / "model.keras")),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0),
        rates,
    ]
    losses = history(
        model, x, y, batch_size=16, epochs=5, validation_data=(x[:13], y[:13]), callbacks=used, shuffle=False
    )
    files = len(list(own.glob("*"))) if own.exists() else 0
    return results_of(model, rates=rates.seen, **losses) | {f"{OWN}files": np.array(files)}


def resumed(job: Job) -> Results:
    """Fit two epochs, begin anew with another model, and let BackupAndRestore carry on where the first one ended."""
    folder = job.folder / f"backup_{job.alone}"
    for epochs in (2, 4):
        model, (x, y) = built(job, optimizer="adam"), data(job)
        model.get_layer("dropout").rate = 0.0
        backup = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=epochs == 4)
        losses = history(model, x, y, batch_size=16, epochs=epochs, callbacks=[backup], shuffle=False)
    return results_of(model, **losses)


@keras.saving.register_keras_serializable("tests")
class SlowToSave(keras.layers.Dense):
    """A layer whose weights take a while to write: who does not wait for them finds no file, or half of one."""

    def save_own_variables(self, store: Any) -> None:
        """Write them late."""
        time.sleep(0.3)
        super().save_own_variables(store)


class Reads(keras.callbacks.Callback):
    """Reads, on every worker, what a callback before it has written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.read: list[Array] = []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Read the file of this epoch."""
        self.read.append(keras.saving.load_model(self.path).get_weights()[0])


def written_files(job: Job) -> Results:
    """Read on every worker what worker 0 alone writes, as soon as the call that writes it is over."""
    own = job.folder / f"files_{job.count}_{job.task if not job.is_rewritten else 'all'}"
    model = keras.Sequential([keras.Input((4,)), SlowToSave(3, name="slow")], name="files")
    model.get_layer("slow").kernel.assign(initial(7, "slow", (4, 3), 0.3, 0.0, "float32"))
    model.compile(KERAS_OPTIMIZERS["adam"](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = ar.distribute(model, job.config("mirrored")) if job.is_rewritten else model
    keras.utils.set_random_seed(3)
    reads = Reads(own / "each.keras")
    used = [
        keras.callbacks.ModelCheckpoint(str(own / "each.keras")),
        reads,
        keras.callbacks.BackupAndRestore(str(own / "backup"), delete_checkpoint=False),
        keras.callbacks.CSVLogger(str(own / "log.csv")),
    ]
    own.mkdir(parents=True, exist_ok=True)
    losses = history(model, *data(job), batch_size=16, epochs=2, callbacks=used, shuffle=False)
    lines = len((own / "log.csv").read_text().splitlines())
    with open(own / "backup" / "training_metadata.json", encoding="utf-8") as file:
        epoch = json.load(file)["epoch"]
    model.save(own / "model.keras")
    model.save_weights(own / "model.weights.h5")
    if job.task == 0:
        model.save(own / "of_worker_0.keras")  # nobody waits for it
    model.export(own / "exported", verbose=False)
    again = keras.saving.load_model(own / "model.keras")
    model.load_weights(own / "model.weights.h5")
    exported = tf.saved_model.load(own / "exported")  # its functions do not keep its variables
    served = exported.serve(np.ones((2, 4), np.float32))
    found = {"read": reads.read, "again": again.get_weights()[0], "served": served, "lines": lines, "epoch": epoch}
    return results_of(model, **losses, **found)


CASES: dict[str, Case] = {
    "written_files": written_files,
    "fit": fit,
    "weighted": weighted,
    "dataset": dataset,
    "on_batch": on_batch,
    "recompiled": recompiled,
    "two_inputs": two_inputs,
    "per_worker": per_worker,
    "callbacks": callbacks,
    "resumed": resumed,
}
