"""A program that trains three steps and saves, or restores and trains three more: `checkpoints.py ACTION FROM OUT`.

    through   all six steps
    begin     three steps
    resume    restore FROM/saved, three more

All save to OUT/saved, and write what they have come to into OUT/worker0.npz, ... or OUT/single.npz.

With TF_CONFIG it is a worker of a job; with REPLICAS=2 it trains over two devices of one process; else it is the
program as it was before anybody rewrote it. All kinds of checkpoints are written and read in one run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.jobs.programs import models
from tests.jobs.programs.job import Array, Job
from tests.jobs.programs.worker import split_cpu
from tests.zoo import ZOO, Options

v1 = tf.compat.v1
HALF, ALL = 3, 6
REPLICAS = int(os.environ.get("REPLICAS", "0"))
BATCH = 7
Values = Mapping[str, Array]


def is_rewritten(job: Job) -> bool:
    """Return whether this is not the original program."""
    return job.is_rewritten or REPLICAS > 0


def config(job: Job, **strategy: Any) -> Mapping[str, Any]:
    """Return the configuration."""
    given = job.config(replicas=REPLICAS or 1)
    return {**given, "strategy": {**given["strategy"], **strategy}}


def fit(job: Job, model: Any, steps: range) -> None:
    """Train a model: every worker is given the whole batch."""
    if is_rewritten(job):
        ar.distribute(model, config(job))
    x, y = models.examples(BATCH * ALL)
    for step in steps:
        at = slice(BATCH * step, BATCH * (step + 1))
        model.train_on_batch(x[at], y[at])


def small() -> Any:
    """Return a model without dropout: Keras does not save how far its random numbers have come."""
    model = models.small("adam")
    model.get_layer("dropout").rate = 0.0
    return model


def weights_of(model: Any) -> Values:
    """Return all that training has changed."""
    return {name: value for name, value in models.results_of(model).items() if "seed_generator" not in name}


def weights(job: Job, steps: range, source: Path, target: Path) -> Values:
    """Keras' weights, optimizer included."""
    model = small()
    model.optimizer.build(model.trainable_variables)
    if steps.start:
        spoil(model.variables)
        model.load_weights(source / "model.weights.h5")
    fit(job, model, steps)
    model.save_weights(target / "model.weights.h5")
    return weights_of(model)


def whole(job: Job, steps: range, source: Path, target: Path) -> Values:
    """A whole Keras model."""
    model = keras.models.load_model(source / "model.keras") if steps.start else small()
    fit(job, model, steps)
    model.save(target / "model.keras")
    kept = [*model.trainable_variables, *model.optimizer.variables]  # a model that was loaded has other paths
    return {f"variable {at}": np.asarray(v.value) for at, v in enumerate(kept)}


def checkpoint(job: Job, steps: range, source: Path, target: Path) -> Values:
    """A loop of one's own over a tf.function, with tf.train.Checkpoint."""
    built = ZOO["custom_loop"].build(optimizer="adam")
    step = tf.function(built.step, input_signature=built.specs)
    if is_rewritten(job):
        step = ar.distribute(built.step, config(job), batch_inputs=dict(built.batch_inputs))
    holder = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in built.variables.items()})
    if steps.start:
        spoil(built.variables.values())
        holder.restore(str(source / "loop-1")).assert_consumed()
    for at in steps:
        step(*(tf.constant(job.part(value)) for value in built.feeds(at, BATCH)))
    if job.is_chief:
        holder.save(str(target / "loop"))
    return {name: np.asarray(v) for name, v in built.variables.items()}


def saver(job: Job, steps: range, source: Path, target: Path) -> Values:
    """A v1 graph that has a Saver of its own."""
    built = ZOO["mlp"].builder(Options(optimizer="adam"))  # one of our own, as the Saver adds nodes to it
    with built.graph.as_default():
        own = v1.train.Saver()
    item = GraphItem.from_graph(
        built.graph, train_op=built.train_op, outputs=["loss"], init_op="init", batch_inputs=dict(built.batch_inputs)
    )
    new = ar.rewrite(item, config(job)) if is_rewritten(job) else item
    with new.session() as session, session.graph.as_default():
        session.run("init")
        if steps.start:
            own.restore(session.tf_session, str(source / "graph"))
        for at in steps:
            session.run(["loss", "train"], {name: job.part(value) for name, value in built.feeds(at, BATCH).items()})
        if job.is_chief:
            own.save(session.tf_session, str(target / "graph"), write_meta_graph=False)
        return session.read_variables()


def parts(job: Job, steps: range, source: Path, target: Path) -> Values:
    """Parts that each worker writes beside the next step: a v1 graph, and a model."""
    built = ZOO["mlp"].build(optimizer="adam")
    item = GraphItem.from_graph(
        built.graph, train_op=built.train_op, outputs=["loss"], init_op="init", batch_inputs=dict(built.batch_inputs)
    )
    given = config(job) if is_rewritten(job) else None
    new = ar.rewrite(item, given) if given is not None else item
    with new.session() as session:
        session.run("init")
        if steps.start:
            restored = ar.CheckpointManager(session, source / "parts_graph", config=given).restore()
            assert restored is not None
            assert (restored.step, restored.extra) == (HALF, {"rate": 0.5})
        with ar.CheckpointManager(session, target / "parts_graph", config=given) as manager:
            for at in steps:
                fed = {name: job.part(value) for name, value in built.feeds(at, BATCH).items()}
                session.run(["loss", "train"], fed)
                manager.save(at + 1, {"rate": 0.5})
        values = dict(session.read_variables())
    model = small()
    model.optimizer.build(model.trainable_variables)
    if steps.start:
        spoil(model.variables)
        assert ar.CheckpointManager(model, source / "parts_model", config=given).restore()
    fit(job, model, steps)
    with ar.CheckpointManager(model, target / "parts_model", config=given) as manager:
        manager.save(steps.stop)
        spoil(model.variables)  # what is saved is what was there, however late it is written
        manager.wait()
        manager.restore()
    return values | weights_of(model)


def feedback(job: Job, steps: range, source: Path, target: Path) -> Values:
    """A loop whose gradients are compressed, so that each replica keeps something back; saved with it, and without."""
    built = ZOO["custom_loop"].build(optimizer="sgd", dtype="float32")
    step = tf.function(built.step, input_signature=built.specs)
    parts = {"weights": tf.train.Checkpoint(**{n.replace("/", "_"): v for n, v in built.variables.items()})}
    if is_rewritten(job):
        step = ar.distribute(
            built.step, config(job, compressor="topk"), *built.specs, batch_inputs=dict(built.batch_inputs)
        )
        parts["step"] = step
    holder = tf.train.Checkpoint(**parts)
    if steps.start:
        spoil(built.variables.values())
        holder.restore(str(source / "feedback-1")).expect_partial()  # it may hold residuals, or none
    results = {f"restored {name}": np.asarray(v) for name, v in built.variables.items()}
    results |= {f"kept {name}": value for name, value in kept(step).items()}
    for at in steps:
        step(*(tf.constant(job.part(value)) for value in built.feeds(at, BATCH)))
    if job.is_chief:
        holder.save(str(target / "feedback"))
    results |= {f"left {name}": value for name, value in kept(step).items()}
    return results | {name: np.asarray(v) for name, v in built.variables.items()}


def kept(step: Any) -> Values:
    """Return the residuals of a distributed function."""
    state = vars(step.state) if hasattr(step, "state") else {}
    return {name: np.asarray(v) for name, v in state.items() if "residual" in name}


def spoil(variables: Any) -> None:
    """Give variables values that no training gives: what is restored is seen."""
    for variable in variables:
        variable.assign(tf.cast(tf.ones(variable.shape), variable.dtype) * 9)


KINDS: Mapping[str, Callable[[Job, range, Path, Path], Values]] = {
    "weights": weights,
    "whole": whole,
    "checkpoint": checkpoint,
    "saver": saver,
    "parts": parts,
    "feedback": feedback,
}


def main(action: str, source: Path, out: Path) -> None:
    """Run all kinds."""
    job = Job.here(out)
    if is_rewritten(job):
        split_cpu(max(1, REPLICAS))
    steps = {"through": range(ALL), "begin": range(HALF), "resume": range(HALF, ALL)}[action]
    target = out / "saved"
    target.mkdir(parents=True, exist_ok=True)
    values = {}
    for kind, run in KINDS.items():
        values.update({f"{kind}: {name}": value for name, value in run(job, steps, source / "saved", target).items()})
    name = f"worker{job.task}" if job.is_rewritten else "single"
    np.savez(out / f"{name}.npz", **{key.replace("/", "|"): value for key, value in values.items()})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
