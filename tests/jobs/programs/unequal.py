"""Workers that are given different values of what all share: `unequal.py MODE WHAT OUT`; worker 1 is the odd one.

What `WHAT` says happens in step 3 of 4. With "none" nothing does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.runtime import keras_workers
from tests.jobs.programs.job import Job
from tests.jobs.programs.worker import split_cpu

v1 = tf.compat.v1
MODE, WHAT = sys.argv[1:3]
STEPS, AT = 4, 3
JOB = Job.here(Path(sys.argv[3]))
REPLICAS = int(os.environ.get("JOB_REPLICAS", "1"))
split_cpu(REPLICAS)
CONFIG = {
    **JOB.config(replicas=REPLICAS),
    **json.loads(os.environ.get("JOB_CONFIG", "{}")),
    "timeout_seconds": 5,
    **({"padding": "none"} if WHAT == "length" else {}),
}
X = np.random.default_rng(0).normal(size=(8, 5, 3))


def happens(what: str, step: int) -> bool:
    """Return whether something happens here and now."""
    return what == WHAT and step == AT and JOB.task == 1


def given(step: int) -> tuple[Any, Any]:
    """Return what is fed in a step: this worker's part, and the learning rate."""
    x = JOB.part(X)[:, : 4 if happens("length", step) else 5]
    if "steps_per_run" in CONFIG:
        x = np.stack([x] * (1 if happens("rows", step) else 2))
    return x, np.float64(0.2 if happens("rate", step) else 0.1)


def session() -> None:
    """Train a v1 graph."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [len(X) if WHAT == "static" else None, None, 3], "x")
        rate = v1.placeholder(tf.float64, [], "rate")
        w = v1.get_variable("w", [3, 2], tf.float64, v1.ones_initializer(), use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.einsum("bij,jk->bik", x, w)), name="loss")
        v1.train.GradientDescentOptimizer(rate).minimize(loss, name="train")
        v1.group(v1.global_variables_initializer(), name="init")
        value = v1.placeholder(tf.float64, [3, 2], "value")
        with tf.control_dependencies([v1.assign(w, value)]):
            tf.identity(value, name="set")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["loss", "set"], init_op="init", batch_inputs={"x": 0})
    with ar.rewrite(item, CONFIG).session() as opened:
        opened.run("init")
        for step in range(1, STEPS + 1):
            x, rate = given(step)
            if WHAT == "static" and step == AT and JOB.task == 1:
                rate = np.float64(0.2)
            if happens("write", step):
                opened.write_variable("w", np.zeros((3, 2)))
            if happens("set", step):
                opened.run("set", {"value": np.zeros((3, 2))})
            if happens("read", step):
                opened.read_variable("w")
            opened.run(["loss"] if happens("fetch", step) else ["loss", "train"], {"x": x, "rate": rate})
            print(f"did step {step}", flush=True)


def function() -> None:
    """Train a function."""
    w = tf.Variable(np.ones((3, 2)), name="w")

    def train(x: Any, rate: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w))
        w.assign_sub(rate * tape.gradient(loss, w))
        return loss

    specs = tf.TensorSpec([None, None if WHAT == "length" else 5, 3], tf.float64), tf.TensorSpec([], tf.float64)
    step_function = ar.distribute(train, CONFIG, *specs, batch_inputs={"x": 0})
    for step in range(1, STEPS + 1):
        if happens("write", step):
            w.assign(np.zeros((3, 2)))
        if happens("rewrite", step):
            w.assign(w.numpy())
        step_function(*given(step))
        print(f"did step {step}", flush=True)


class Odd(keras.callbacks.Callback):
    """Does on one worker what should be done on all."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Do it."""
        step = batch + 1
        if happens("write", step):
            self.model.optimizer.learning_rate = 0.5
        if happens("rewrite", step):
            self.model.optimizer.learning_rate = 0.1
        if happens("evaluate", step):
            self.model.evaluate(*data(), batch_size=8, verbose=0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell."""
        print(f"did step {batch + 1}", flush=True)


def data() -> tuple[Any, Any]:
    """Return four batches; in the third, one number is another one."""
    x = np.random.default_rng(1).normal(size=(8 * STEPS, 3)).astype("float32")
    y = x[:, :1].copy()
    if WHAT == "data" and JOB.task == 1:
        x[8 * AT - 1, 2] += 1e-3
    if WHAT == "labels" and JOB.task == 1:
        y[8 * (AT - 1)] += 1
    return x, y


def keras_model() -> None:
    """Fit a model."""
    keras.utils.set_random_seed(1)
    keras_workers._SMALL = int(os.environ.get("JOB_SMALL", keras_workers._SMALL))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    model = ar.distribute(model, CONFIG)
    model.fit(*data(), batch_size=8, verbose=0, shuffle=False, callbacks=[Odd()])


{"session": session, "function": function, "keras": keras_model}[MODE]()
print("done", flush=True)
