"""Workers that hold logical devices of replicas, and the single process they are compared with: `mesh.py CASES OUT`."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs.job import Case, Job, Results
from tests.jobs.programs.worker import run, split_cpu, write
from tests.passes.sharding import test_blocks_backward as blocks
from tests.passes.sharding import test_decoder_block as decoder
from tests.support import cut_images, split_models
from tests.support.model_axis import descent, on_mesh, variables_of

SIZES = (8, 11, 8)


@dataclass(frozen=True)
class Model:
    """A model to cut.

    Attributes:
        variables: makes them.
        step_of: makes the step of variables.
        data: the batch of a step, all of it.
        sharding: entries of the configuration, given the size of the model axis.
        specs: of the data, where a name in them is cut.
        strategy: where whole variables live.
    """

    variables: Callable[[], Mapping[str, Any]]
    step_of: Callable[[Any], Callable[..., Any]]
    data: Callable[[int], Sequence[Any]]
    sharding: Callable[[int], Any]
    specs: Sequence[Any] = ()
    strategy: str = "AllReduce"


def clipped(variables: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a step that clips gradients by the norm of all of them, and keeps the sums of their squares."""
    w, v, squares = (variables[name] for name in ("w", "v", "squares"))

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ w) @ v - y) ** 2)
        (dw, dv), _ = tf.clip_by_global_norm(tape.gradient(loss, [w, v]), 0.5)
        new = squares + dw * dw
        w.assign_sub(0.1 * dw / tf.sqrt(new))
        squares.assign(new)
        v.assign_sub(0.1 * dv)
        return loss

    return step


def clipped_variables() -> dict[str, Any]:
    """Return variables of which one is a slot of another."""
    made = variables_of({"w": (4, 6), "v": (6, 2)})
    return {**made, "squares": tf.Variable(np.ones((4, 6)), trainable=False, name="squares")}


MODELS = {
    "mlp": Model(
        split_models.variables,
        split_models.step_of,
        lambda step: split_models.batch(step, SIZES[step]),
        split_models.shardings,
    ),
    "decoder": Model(
        lambda: variables_of(decoder.SHAPES),
        descent(decoder.loss),
        lambda _: decoder.data(),
        lambda count: on_mesh(1, count, decoder.SPLIT)["sharding"],
    ),
    "experts": Model(
        lambda: variables_of(blocks.MOE),
        descent(blocks.moe_loss(2)),
        lambda _: blocks.examples(),
        lambda count: on_mesh(1, count, blocks.EXPERT_PARALLEL)["sharding"],
    ),
    "slots": Model(
        clipped_variables,
        clipped,
        lambda _: [np.random.default_rng(1).normal(size=(8, size)) for size in (4, 2)],
        lambda count: [{"match": "w", "replicate": True}, {"match": "squares", "split": [1, count]}],
        strategy="PS",
    ),
    "sharded": Model(
        split_models.variables,
        split_models.step_of,
        lambda step: split_models.batch(step, SIZES[step]),
        split_models.shardings,
        strategy="FSDP",
    ),
    "images": Model(
        cut_images.variables,
        cut_images.step_of,
        lambda _: cut_images.batch(),
        lambda count: cut_images.config(count)["sharding"],
        cut_images.SPECS,
    ),
}


def trained(job: Job, model: Model) -> Results:
    """Train a function: each process is given its part of a batch, unless replicas lie across processes, or stages."""
    each, data, parts, stages = map(int, os.environ.get("JOB_MESH", "1,1,1,1").split(","))
    variables = model.variables()
    step: Any = tf.function(model.step_of(variables))
    if job.is_rewritten:
        mesh: dict[str, Any] = {"mesh": {"data": data, "model": parts, "stage": stages}}
        if stages > 1:
            mesh |= {"pipeline": {"stages": stages, "microbatches": 2}, "strategy": {"name": "Pipeline"}}
        elif model.strategy != "AllReduce":
            mesh["strategy"] = {"name": model.strategy}
        mesh["sharding"] = model.sharding(parts)
        config = {**job.config(), **mesh, "devices": [f"CPU:{i}" for i in range(each)], "timeout_seconds": 30}
        step = ar.distribute(model.step_of(variables), config, *model.specs)
    found = {}
    for number in range(len(SIZES)):
        given = model.data(number)
        if job.is_rewritten and stages == 1 and each % parts == 0:
            given = [job.part(value) for value in given]
        found[f"loss {number}"] = step(*map(tf.constant, given)).numpy()
    if job.is_rewritten:
        edges = [edge for item in step.items for edge in item.report.plan.model_edges]
        found["collectives"] = np.array(sum("collective" in edge.lowering for edge in edges))
    return {**found, **{f"variable {name}": one.numpy() for name, one in variables.items()}}


def looked_up(variables: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a step that looks rows up, and fails where there are none of such numbers."""

    def step(ids: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.gather(variables["table"], ids) @ variables["up"])
            loss = tf.reduce_mean((hidden @ variables["down"] - y) ** 2)
        for name, gradient in zip(variables, tape.gradient(loss, list(variables.values())), strict=True):
            variables[name].assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def rewritten(job: Job, units: int = 16) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the step of `looked_up`, whose hidden units are cut between the processes, and its variables."""
    variables = variables_of({"table": (10, 8), "up": (8, units), "down": (units, 8)})
    step = tf.function(looked_up(variables))
    if not job.is_rewritten:
        return step, variables
    sharding = [{"match": "up", "split": [1, 2]}, {"match": "down", "split": [2, 1]}]
    config = {**job.config(), "mesh": {"data": 1, "model": 2}, "sharding": sharding, "devices": ["CPU:0"]}
    specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 8], tf.float64)
    return ar.distribute(looked_up(variables), {**config, "timeout_seconds": 30}, *specs), variables


def failing(job: Job) -> Results:
    """Go on after each of many steps that fail on all devices at about the same time."""
    step, _ = rewritten(job)
    rng, found = np.random.default_rng(0), {}
    for number in range(120):
        ids, y = rng.integers(0, 10, 4), rng.normal(size=(4, 8))
        try:
            found[f"loss {number}"] = step(tf.constant(ids + 1000 * (number % 3 == 2)), tf.constant(y)).numpy()
        except tf.errors.InvalidArgumentError:
            found[f"loss {number}"] = np.float64(-1)
    return found


def reading(job: Job) -> Results:
    """Read variables between two steps, worker 1 later than worker 0, which must not have gone on."""
    step, variables = rewritten(job)
    rng, found = np.random.default_rng(0), {}
    for number in range(8):
        step(tf.constant(rng.integers(0, 10, 4)), tf.constant(rng.normal(size=(4, 8))))
        if job.is_rewritten and job.task == 1:
            time.sleep(0.1)
        for name in list(variables)[number % 2 :]:
            found[f"{name} {number}"] = variables[name].numpy()
        if number == 4:
            variables["up"].assign(variables["up"] / 2)
    return found


def dropped(job: Job) -> Results:
    """Train one program after another, of one form and other sizes; worker 0 drops each before worker 1 has read it."""
    found = {}
    for number, units in enumerate((16, 12, 16)):
        step, variables = rewritten(job, units)
        ids, y = np.arange(4), np.ones((4, 8))
        found[f"loss {number}"] = step(tf.constant(ids), tf.constant(y)).numpy()
        if job.is_rewritten and job.task == 1:
            time.sleep(1)
        found |= {f"{name} {number}": variable.numpy() for name, variable in variables.items()}
        del step, variables
        gc.collect()
    return found


def callbacks(job: Job) -> Results:
    """Fit a Keras model whose callbacks read and write variables, worker 1 later than worker 0."""
    import keras

    class Sums(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[float] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if job.is_rewritten and job.task == 1:
                time.sleep(0.05)
            self.found.append(sum(float(weight.sum()) for weight in self.model.get_weights()))

    keras.utils.set_random_seed(0)
    layers, rng = keras.layers, np.random.default_rng(0)
    inputs = layers.Input((4,), dtype="float64")
    hidden = layers.Dense(8, activation="tanh", name="up", dtype="float64")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="down", dtype="float64")(hidden))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    if job.is_rewritten:
        sharding = [{"match": "up/kernel", "split": [1, 2]}, {"match": "down/kernel", "split": [2, 1]}]
        mesh = {"mesh": {"data": 1, "model": 2}, "sharding": sharding, "devices": ["CPU:0"], "timeout_seconds": 30}
        model = ar.distribute(model, {**job.config(), **mesh})
    x, y, sums = rng.normal(size=(16, 4)), rng.normal(size=(16, 2)), Sums()
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    fitted = model.fit(x[:12], y[:12], 4, 6, 0, [sums, stop], validation_data=(x[12:], y[12:]), shuffle=False)
    model.set_weights([weight / 2 for weight in model.get_weights()])
    model.fit(x, y, 4, 1, 0, [sums], shuffle=False)
    kept = {f"weight {i}": weight for i, weight in enumerate(model.get_weights())}
    return {"sums": np.array(sums.found), "losses": np.array(fitted.history["val_loss"]), **kept}


CASES: dict[str, Case] = {name: functools.partial(trained, model=model) for name, model in MODELS.items()}
CASES |= {"failing": failing, "reading": reading, "dropped": dropped, "callbacks": callbacks}


def main(names: Sequence[str], out: Path) -> None:
    """Run as what TF_CONFIG says this process is."""
    who = Job.here(out / "files")
    if who.is_rewritten:
        split_cpu(int(os.environ["JOB_MESH"].split(",")[0]))
    name = f"worker{who.task}" if who.is_rewritten else "single"
    write(out / f"{name}.pkl", run(list(names), who, CASES))


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
