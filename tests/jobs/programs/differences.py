"""Workers that differ in one thing after another: `differences.py OUT`; OUT/worker0.json gets what each is told.

Nothing hangs where a difference is found before the first step, so one pair of processes runs all cases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.jobs.programs import models
from tests.jobs.programs.job import Job
from tests.support.training import make_item, placeholder, variable
from tests.zoo import ZOO

X = np.random.default_rng(0).normal(size=(8, 4))


def session(job: Job, item: GraphItem, **config: Any) -> None:
    """Open a session on a graph."""
    ar.rewrite(item, {**job.config(), **config}).session()


def linear(value: float) -> GraphItem:
    """Return a graph whose variable begins with a value."""

    def forward() -> dict[str, Any]:
        return {"loss": tf.reduce_mean(placeholder("x", None, 4) @ variable("w", np.full((4, 1), value)))}

    return make_item(forward, batch_inputs={"x": 0})


def program(job: Job) -> None:
    """Train with another optimizer."""
    built = ZOO["mlp"].build(optimizer="adam" if job.is_chief else "momentum")
    inputs = dict(built.batch_inputs)
    session(job, GraphItem.from_graph(built.graph, train_op="train", outputs=["loss"], batch_inputs=inputs))


def configuration(job: Job) -> None:
    """Ask for other semantics."""
    session(job, linear(1.0), semantics={"batch_norm": "sync" if job.is_chief else "local"})


def initial_value(job: Job) -> None:
    """Begin with another value, as whoever draws it with NumPy does."""
    session(job, linear(1.0 + job.task))


def number(job: Job) -> None:
    """Train with another learning rate, which is a constant of the function."""
    function(job, rate=0.1 + job.task, captured=1.0)


def captured(job: Job) -> None:
    """Use another number from outside the function."""
    function(job, rate=0.1, captured=1.0 + job.task)


def function(job: Job, rate: float, captured: float, text: str = "text") -> None:
    """Run one step of a function."""
    weights = tf.Variable(np.ones((4, 1)), name="w")
    scale = tf.constant(captured, tf.float64)
    named = tf.constant([text, "text"])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(scale * x @ weights) * tf.cast(tf.equal(named[0], named[1]), tf.float64)
        weights.assign_sub(rate * tape.gradient(loss, weights))
        return loss

    loss = ar.distribute(step, job.config())(tf.constant(job.part(X)))
    np.testing.assert_allclose(loss, captured * np.mean(np.sum(X, 1)))


def shape(job: Job) -> None:
    """Give a function batches that are padded to different lengths."""
    weights = tf.Variable(np.ones((1, 1)), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x[:, :, None] @ weights)
        weights.assign_sub(tape.gradient(loss, weights))
        return loss

    ar.distribute(step, {**job.config(), "padding": "none"})(tf.constant(X[:4, : 3 + job.task]))


def data(job: Job) -> None:
    """Fit a model on another batch."""
    x, y = models.examples(8)
    models.built(job).train_on_batch(x + job.task, y)


def seed(job: Job) -> None:
    """Set another seed before a model is distributed."""
    keras.utils.set_random_seed(job.task)
    ar.distribute(models.small("sgd"), job.config())


def text(job: Job) -> None:
    """Compare a batch with another text from outside the function."""
    function(job, rate=0.1, captured=1.0, text=f"text {job.task}")


def equal(job: Job) -> None:
    """Differ in nothing: what happened before has spoilt nothing."""
    function(job, rate=0.1, captured=1.0)


CASES: tuple[Callable[[Job], None], ...] = (
    program,
    configuration,
    initial_value,
    number,
    captured,
    text,
    shape,
    data,
    seed,
    equal,
)


def main(out: Path) -> None:
    """Run all cases."""
    job, told = Job.here(out), {}
    for case in CASES:
        try:
            case(job)
            told[case.__name__] = ""
        except ar.ClusterError as error:
            told[case.__name__] = str(error)
    (out / f"worker{job.task}.json").write_text(json.dumps(told))


main(Path(sys.argv[1]))
