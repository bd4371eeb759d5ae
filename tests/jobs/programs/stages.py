"""Workers that hold the stages of one pipeline, and the single process they are compared with: `stages.py CASES OUT`.

with TF_CONFIG      OUT/worker0.pkl, OUT/worker1.pkl      every worker gives the whole batch
without             OUT/single.pkl
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.jobs.programs import models
from tests.jobs.programs.job import Case, Job, Results
from tests.jobs.programs.worker import run, write
from tests.support import staged
from tests.zoo import ZOO

v1 = tf.compat.v1
SIZES = (8, 11, 8)
OWN = "own "
"""Begins the names of results that only worker 0 has."""


def config(job: Job, **pipeline: Any) -> Mapping[str, Any]:
    """Return a configuration with a stage for each worker; for one process, the same stages in it."""
    stages = job.count if job.count > 1 else 2
    pipeline = {"stages": stages, "microbatches": 4, **pipeline}
    own = {} if job.count > 1 else {"devices": ["CPU:0"]}
    return {**own, "pipeline": pipeline, "timeout_seconds": 30}


def normalised() -> tuple[Any, list[str]]:
    """Layers with batch normalisation and moving averages, which micro-batches have to take in turn."""
    h, cuts = staged.inputs(6), []
    for i in range(4):
        h = h @ staged.variable(f"w{i}", staged.values(6, 6, seed=i))
        mean, variance = tf.nn.moments(h, [0])
        for name, statistic in (("mean", mean), ("variance", variance)):
            average = v1.get_variable(f"{name}{i}", initializer=np.zeros(6), trainable=False, use_resource=True)
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, average.assign_sub(0.1 * (average - statistic)))
        h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3), name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean(h**2 * tf.range(6, dtype=h.dtype)), cuts[:3]


def recurrent() -> tuple[Any, list[str]]:
    """Recurrent layers, each of which is a loop of its stage."""
    h, cuts = staged.inputs(6), []
    for i in range(4):
        w, x = staged.variable(f"w{i}", staged.values(6, 6, seed=i)), h
        step = lambda t, h, w=w, x=x: (t + 1, tf.tanh(h @ w + x))  # noqa: E731
        h = tf.identity(tf.while_loop(lambda t, _: t < 3, step, (0, tf.zeros_like(x)))[1], name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2), cuts[:3]


FORWARD = {**staged.MODELS, "normalised": normalised, "recurrent": recurrent}


def where(job: Job, cuts: Sequence[str]) -> Sequence[str]:
    """Return the boundaries of as many stages as there are workers."""
    return {2: cuts[1:2], 3: cuts[:2]}.get(config(job)["pipeline"]["stages"], cuts)


def graph(name: str, *, always_in_stages: bool = False, batch_norm: str = "sync", **pipeline: Any) -> Case:
    """Return the case of a graph in a session; the single process trains the original unless told otherwise."""

    def case(job: Job) -> Results:
        item, cuts = staged.staged_item(FORWARD[name])
        is_cut = job.is_rewritten or always_in_stages
        asked = {**config(job, boundaries=where(job, cuts), **pipeline), "semantics": {"batch_norm": batch_norm}}
        new = ar.rewrite(item, asked) if is_cut else item
        feeds = [staged.feed(item, step, size) for step, size in enumerate(SIZES)]
        outputs, variables = staged.train(new, feeds)
        found = {f"{key} of step {step}": value for step, got in enumerate(outputs) for key, value in got.items()}
        found |= {f"variable {key}": value for key, value in variables.items()}
        if not job.is_rewritten:
            short = staged.train(new, [{"x": feed["x"][:6]} for feed in feeds])[1]
            found |= {f"{OWN}short {key}": value for key, value in short.items()}
        return found

    return case


def where_it_ran(job: Job) -> Results:
    """Train one step, and note on which device each node has really run."""
    item, cuts = staged.staged_item(staged.mlp)
    new = ar.rewrite(item, config(job, boundaries=where(job, cuts))) if job.is_rewritten else item
    ran = {}
    with new.session() as session:
        session.run(item.init_op)
        session.run("train", staged.feed(item, 0))
        if job.is_chief:  # past the package: nobody else has to do this
            told = v1.RunMetadata()
            trace = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            session.tf_session.run("train", {"x:0": staged.feed(item, 1)["x"]}, trace, told)
            for device in told.step_stats.dev_stats:
                ran |= {f"{OWN}{node.node_name}": np.array(device.device) for node in device.node_stats}
    return ran


def saver(job: Job) -> Results:
    """Save half-way, restore in another session, and in one of the original, which each carry on."""
    item, cuts = staged.staged_item(staged.mlp)
    with item_graph(item).as_default() as original:
        own = v1.train.Saver(v1.global_variables())
    item = GraphItem.from_graph(original, train_op="train", outputs=["loss"], init_op="init")
    new = ar.rewrite(item, config(job, boundaries=where(job, cuts))) if job.is_rewritten else item
    path, found = str(job.folder / "half"), {}

    def trained(session: Any, steps: Iterable[int]) -> Results:
        for step in steps:
            session.run(["loss", "train"], staged.feed(item, step))
        return session.read_variables()

    with new.session() as session:
        session.run(item.init_op)
        trained(session, range(3))
        if job.is_chief:
            with session.graph.as_default():
                own.save(session.tf_session, path, write_meta_graph=False)
        found |= {f"variable {name} at the end": value for name, value in trained(session, range(3, 6)).items()}
    for name, each in {"in stages": new, "in one process": item}.items():
        with each.session() as session:
            with session.graph.as_default():
                own.restore(session.tf_session, path)
            values = trained(session, range(3, 6))
        found |= {f"variable {key} restored {name}": value for key, value in values.items()}
    return found


def item_graph(item: GraphItem) -> Any:
    """Return a tf.Graph that a Saver can be added to: `staged_item` keeps none."""
    graph = tf.Graph()
    with graph.as_default():
        loss, _ = staged.mlp()
        tf.identity(loss, name="loss")
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer(0.05).minimize(loss, step, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return graph


def function(job: Job) -> Results:
    """Call a function whose gradients are clipped by their common norm; write a variable, and restore a checkpoint."""
    built = ZOO["custom_loop"].build(optimizer="adam")
    if job.task:  # what worker 0 has counts
        for variable in built.variables.values():
            if "float" in str(variable.dtype):
                variable.assign(1.5 * tf.convert_to_tensor(variable))
    step = tf.function(built.step, input_signature=built.specs)
    if job.is_rewritten:
        step = ar.distribute(built.step, config(job), batch_inputs=dict(built.batch_inputs))
    holder = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in built.variables.items()})
    trained = next(v for v in built.variables.values() if v.shape.rank == 2)
    found: Results = {}
    for at, size in enumerate((8, 7, 11, 8, 5, 5)):
        if at == 2:
            if job.is_chief:
                holder.save(str(job.folder / "loop"))
            trained.assign(0.5 * trained)
        if at == 4:
            holder.restore(str(job.folder / "loop-1")).assert_consumed()
        outputs = step(*map(tf.constant, built.feeds(at, size)))
        found |= {f"{name} of step {at}": np.asarray(value) for name, value in outputs.items()}
        found |= {f"variable {name} after step {at}": np.asarray(v) for name, v in built.variables.items()}
    return found


def fit(job: Job) -> Results:
    """Fit with dropout, shuffling, validation, a callback and an uneven last batch; load what was saved."""
    import keras

    x, y = models.examples(45)
    found: dict[str, Any] = {}
    path = job.folder / "model.weights.h5"
    for part in ("first", "loaded"):
        model = models.small("adam")
        if part == "loaded":
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        if job.is_rewritten:
            ar.distribute(model, config(job))
        keras.utils.set_random_seed(3)
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.7 * rate)
        losses = models.history(
            model, x, y, batch_size=16, epochs=2, validation_data=(x[:13], y[:13]), callbacks=[rates]
        )
        model.save_weights(path)
        found |= {f"{name} {part}": value for name, value in losses.items()}
        found[f"evaluated {part}"] = model.evaluate(x, y, batch_size=16, verbose=0)
        found[f"predicted {part}"] = model.predict(x[:11], batch_size=4, verbose=0)
    return models.results_of(model, **found)


def iterator(job: Job) -> Results:
    """Train a v1 graph on a pipeline inside it, until it ends: worker 0's is the one that counts."""
    graph = tf.Graph()
    with graph.as_default():
        data = tf.data.Dataset.from_tensor_slices(staged.values(20, 6, seed=9)).batch(8)
        batches = v1.data.make_initializable_iterator(data)
        h = tf.identity(batches.get_next(), name="x")
        for i in range(2):
            h = tf.tanh(h @ staged.variable(f"w{i}", staged.values(6, 6, seed=i)), name=f"h{i}")
        loss = tf.identity(tf.reduce_mean((h - 1) ** 2), name="loss")
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        tf.group(v1.global_variables_initializer(), batches.initializer, name="start")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="start")
    new = ar.rewrite(item, config(job, boundaries=["h0"])) if job.is_rewritten else item
    losses = []
    with new.session() as session:
        session.run(item.init_op)
        while True:
            try:
                losses.append(session.run(["loss", "train"])[0])
            except tf.errors.OutOfRangeError:
                break
        variables = {f"variable {name}": value for name, value in session.read_variables().items()}
    return {"losses": np.array(losses), **variables}


CASES: dict[str, Case] = {
    "mlp": graph("mlp"),
    "tied": graph("tied", schedule="gpipe"),
    "dropout": graph("dropout"),
    "normalised": graph("normalised", always_in_stages=True, batch_norm="local"),
    "recurrent": graph("recurrent"),
    "where_it_ran": where_it_ran,
    "saver": saver,
    "function": function,
    "fit": fit,
    "iterator": iterator,
}


def main(names: Sequence[str], out: Path) -> None:
    """Run as what TF_CONFIG says this process is."""
    who = Job.here(out / "files")
    name = f"worker{who.task}" if who.is_rewritten else "single"
    job = who if who.is_rewritten else Job(folder=out / "single_files")
    write(out / f"{name}.pkl", run(list(names), job, CASES))


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
