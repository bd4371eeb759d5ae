"""Function and Keras mode with parameter servers: steps of several shapes, several models, what callbacks change."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs import models
from tests.jobs.programs.job import Case, Job, Results
from tests.zoo import ZOO


def several_shapes(job: Job) -> Results:
    """Call one function with inputs of two shapes, which makes two graphs of the same variables, by turns."""
    w, b = (tf.Variable(value, dtype=tf.float64) for value in (np.linspace(-1, 1, 12).reshape(4, 3), np.zeros(3)))
    slots = [tf.Variable(tf.zeros_like(v)) for v in (w, b)]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_mean(tf.reshape(x, [tf.shape(x)[0], -1, 4]), 1) @ w + b
            loss = tf.reduce_mean(tf.square(y - 1))
        for variable, slot, slope in zip((w, b), slots, tape.gradient(loss, (w, b)), strict=True):
            slot.assign(0.9 * slot + slope)
            variable.assign_sub(0.1 * slot)
        return {"loss": loss}

    run = ar.distribute(step, job.config(), batch_inputs={"x": 0}) if job.is_rewritten else tf.function(step)
    results: Results = {}
    rng = np.random.default_rng(0)
    for at, (size, *shape) in enumerate([(8, 4), (5, 2, 4), (1, 4), (7, 2, 4), (6, 4), (6, 4)]):
        if at == 4:
            w.assign(0.5 * w)  # between two steps, as a program's own code may
        x = job.part(rng.normal(size=(size, *shape)))
        results[f"loss of step {at}"] = np.asarray(run(tf.constant(x))["loss"])
        results |= {f"variable {i} after step {at}": np.asarray(v) for i, v in enumerate((w, b, *slots))}
    return results


def two_models(job: Job) -> Results:
    """Fit two models by turns, evaluate and predict in between, and let a callback set the learning rate."""
    one, two = models.built(job), models.built(job, optimizer="sgd")
    x, y = models.data(job)
    found: dict[str, Any] = {}
    for epoch in range(2):
        for name, model in (("one", one), ("two", two)):
            rates = keras.callbacks.LearningRateScheduler(lambda _, rate: 0.7 * rate)
            fitted = models.history(model, x, y, batch_size=16, shuffle=False, callbacks=[rates])
            found[f"loss of {name} in epoch {epoch}"] = fitted["loss"]
            found[f"evaluated {name} in epoch {epoch}"] = model.evaluate(x[:13], y[:13], batch_size=4, verbose=0)
            found[f"predicted {name} in epoch {epoch}"] = model.predict(x[:5], verbose=0)
    weights = {f"variable {i} of two": np.asarray(v) for i, v in enumerate(two.get_weights())}
    return models.results_of(one, **found) | weights


def zoo(name: str, optimizer: str, **config: Any) -> Case:
    """Return the case of a Keras entry of the zoo."""

    def case(job: Job) -> Results:
        model, (x, y) = models.built(job, name, optimizer, **config), models.data(job, name, 22)
        return models.results_of(model, **models.history(model, x, y, batch_size=5, epochs=2, shuffle=False))

    return case


def without_updates(job: Job) -> Results:
    """Call a function that only looks at what another one trains."""
    built = ZOO["custom_loop"].build(optimizer="adam")
    step = built.step
    trained = list(built.variables.values())

    def look(x: Any) -> Any:
        return {"norm": tf.add_n([tf.reduce_sum(tf.cast(v, tf.float64)) for v in trained]) * tf.reduce_mean(x)}

    specs = [tf.TensorSpec([None], tf.float64)]
    watch = tf.function(look, input_signature=specs)
    run = tf.function(step, input_signature=built.specs)
    if job.is_rewritten:
        run = ar.distribute(step, job.config(), batch_inputs=dict(built.batch_inputs))
    results: Results = {}
    for at, size in enumerate((8, 3)):
        parts = [job.part(v, axis) for v, axis in zip(built.feeds(at, size), built.batch_inputs.values(), strict=True)]
        results |= {f"{k} of step {at}": np.asarray(v) for k, v in run(*map(tf.constant, parts)).items()}
        results[f"variable norm {at}"] = np.asarray(watch(tf.constant([1.0, 3.0], tf.float64))["norm"])
    return results


CASES: dict[str, Case] = {
    "several_shapes": several_shapes,
    "two_models": two_models,
    "without_updates": without_updates,
    "keras_adagrad": zoo("keras_two_inputs", "adagrad"),
}
