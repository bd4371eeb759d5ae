"""Several steps per run, in a loop inside the graph of each process; the process alone does one step after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.jobs.programs.job import Case, Job, Results

v1 = tf.compat.v1
EACH, STEPS, ROWS = 3, 7, 6


def examples() -> tuple[Any, Any]:
    """Return seven batches of six."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(STEPS, ROWS, 4)), rng.normal(size=(STEPS, ROWS, 3))


def session(mode: str, replicas: int, *, static: bool = False) -> Case:
    """Return the case of a graph that has its iterator inside, and whose data end in the middle of a run."""

    def case(job: Job) -> Results:
        x, y = (part.reshape(-1, part.shape[-1]) for part in examples())
        graph = tf.Graph()
        with graph.as_default():
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS, drop_remainder=static)
            if job.alone:
                data = data.map(lambda x, y: (x[:2], y[:2]))
            x, y = v1.data.make_one_shot_iterator(data).get_next(name="next")
            w = v1.get_variable("w", initializer=np.ones((4, 3)), use_resource=True)
            step = v1.train.get_or_create_global_step()
            loss = tf.reduce_mean(tf.square(x @ w - y), name="loss")
            v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step, name="train")
            v1.variables_initializer(v1.global_variables(), name="init")
        batch = {"batch_inputs": {"next": 0, "next:1": 0}} if static else {}
        item = GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init", **batch)
        new = ar.rewrite(item, job.config(mode, replicas, steps_per_run=EACH)) if job.is_rewritten else item
        losses = {}
        with new.session() as running:
            running.run("init")
            done = 0
            try:
                while True:
                    loss = running.run(["loss", "train"])[0]
                    done += EACH if job.is_rewritten else 1
                    losses[f"loss of step {done}"] = np.asarray(loss)
            except tf.errors.OutOfRangeError:
                pass
            found = {f"variable {name}": running.read_variable(name) for name in item.variables}
        return {**found, **{name: losses[name] for name in ("loss of step 3", "loss of step 6")}}

    return case


def function(mode: str, replicas: int) -> Case:
    """Return the case of a function that is given the batches of several steps at once."""

    def case(job: Job) -> Results:
        x, y = (job.part(part, axis=1) for part in examples())
        w, done = tf.Variable(np.ones((4, 3)), name="w"), tf.Variable(0, dtype=tf.int64, name="done")

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ w - y))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            done.assign_add(1)
            return loss

        losses = {}
        if job.is_rewritten:
            several = ar.distribute(step, job.config(mode, replicas, steps_per_run=EACH))
            for begin in range(0, STEPS, EACH):
                end = min(begin + EACH, STEPS)
                losses[end] = several(x[begin:end], y[begin:end])
        else:
            losses = {at + 1: step(x[at], y[at]) for at in range(STEPS)}
        results = {f"loss of step {at}": np.asarray(losses[at]) for at in (3, 6, 7)}
        return {**results, "variable w": w.numpy(), "variable done": done.numpy()}

    return case


CASES: dict[str, Case] = {
    "steps_of_a_session": session("mirrored", 1),
    "steps_of_a_session_static": session("mirrored", 1, static=True),
    "steps_of_a_session_shared": session("shared", 2),
    "steps_of_a_function": function("mirrored", 1),
    "steps_of_a_function_shared": function("shared", 2),
}
