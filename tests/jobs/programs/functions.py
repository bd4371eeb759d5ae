"""Function mode: training functions over variables that each process has made for itself."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.function import step as function_step
from autograph_rewrite.runtime.function.step import LAST
from tests.jobs.programs.job import Case, Job, Results
from tests.zoo import ZOO

SIZES = (8, 7, 1, 11)


def zoo(name: str, optimizer: str = "adam", mode: str = "mirrored", replicas: int = 1, spoilt: float = 1.0) -> Case:
    """Return the case of a zoo entry; `spoilt` scales the initial values of all workers but the first."""

    def case(job: Job) -> Results:
        built = ZOO[name].build(optimizer=optimizer)
        if job.task:
            for variable in built.variables.values():
                if "float" in str(variable.dtype):
                    variable.assign(spoilt * tf.convert_to_tensor(variable))
        step = tf.function(built.step, input_signature=built.specs)
        if job.is_rewritten:
            step = ar.distribute(built.step, job.config(mode, replicas), batch_inputs=dict(built.batch_inputs))
        results = {}
        for at, size in enumerate(SIZES):
            whole = zip(built.feeds(at, size), built.batch_inputs.values(), strict=True)
            parts = [job.part(value, axis) for value, axis in whole]
            outputs = step(*map(tf.constant, parts))
            results.update({f"{name} of step {at}": np.asarray(value) for name, value in outputs.items()})
        results.update({f"variable {name}": np.asarray(value) for name, value in built.variables.items()})
        return results

    return case


STATED = 9


def stated(job: Job) -> Results:
    """Train a function that states the size of its batch: each worker gives its part, and is refused the whole."""
    built = ZOO["custom_loop"].build(optimizer="adam")
    size = STATED if not job.alone else job.limits(STATED)[1]
    specs = [tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) for spec in built.specs]
    step = tf.function(built.step, input_signature=specs)
    if job.is_rewritten:
        step = ar.distribute(step, job.config(replicas=2), batch_inputs=dict(built.batch_inputs))
        begin, end = job.limits(STATED)
        with pytest.raises(ar.GraphError, match=f"of {STATED}, and the part of worker {job.task} has {end - begin}:"):
            step(*map(tf.constant, built.feeds(0, STATED)))
    results = {}
    for at in range(3):
        outputs = step(*(tf.constant(job.part(value)) for value in built.feeds(at, STATED)))
        results.update({f"{name} of step {at}": np.asarray(value) for name, value in outputs.items()})
    results.update({f"variable {name}": np.asarray(value) for name, value in built.variables.items()})
    return results


WIDE, THIN, ROWS, STEPS = 300, 8, 1024, 8


def two_towers(job: Job) -> Results:
    """Train two short, slow layers beside many that are fast, whose gradients the graph lets expect last."""
    rng = np.random.default_rng(0)
    slow = [tf.Variable(rng.normal(size=(WIDE, WIDE)) * 0.05, name=f"slow_{i}") for i in range(2)]
    fast = [tf.Variable(rng.normal(size=(THIN, THIN)) * 0.4, name=f"fast_{i}") for i in range(20)]

    def step(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for kernel in slow:
                x = tf.tanh(x @ kernel)
            for kernel in fast:
                z = tf.tanh(z @ kernel)
            loss = tf.reduce_mean(tf.square(x - 1)) + tf.reduce_mean(tf.square(z - 1))
        for variable, gradient in zip(slow + fast, tape.gradient(loss, slow + fast), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    train = tf.function(step)
    if job.is_rewritten:
        # Whatever the times are on a busy machine: what is measured, agreed and rewritten is the same.
        function_step.leave_earlier = lambda plan, edges, ready: len(ready) == len(slow + fast)
        train = ar.distribute(step, job.config(strategy={"bucket_bytes": 2 * 8 * WIDE**2}))
    results = {}
    for at in range(STEPS):
        parts = (job.part(rng.normal(size=(ROWS, size))) for size in (WIDE, THIN))
        results[f"loss of step {at}"] = np.asarray(train(*map(tf.constant, parts)))
        if job.is_rewritten:
            (item,) = train.items
            is_learnt = bool(item.report.plan.bucket_order)
            assert is_learnt == (at >= LAST), "it is learnt once"
            buckets = {edge.owner: edge.bucket for edge in item.report.plan.edges}
            assert is_learnt or buckets["slow_0"] == buckets["slow_1"], buckets
    results.update({f"variable {variable.name}": np.asarray(variable) for variable in slow + fast})
    return results


CASES: dict[str, Case] = {
    "two_towers": two_towers,
    "custom_loop": zoo("custom_loop"),
    "custom_loop_shared_two_devices": zoo("custom_loop", mode="shared", replicas=2),
    "custom_loop_stated_batch": stated,
    "function_sparse": zoo("function_sparse", "adagrad"),
    "loss_scaling": zoo("loss_scaling"),
    "other_initial_values": zoo("function_dense", spoilt=1.5),
}
