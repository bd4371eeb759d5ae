"""Input pipelines that all workers build alike: iterators inside a graph, and files for a Keras model."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.jobs.programs import models
from tests.jobs.programs.job import Case, Job, Results

v1 = tf.compat.v1
ROWS = 21


def examples(job: Job) -> Any:
    """Return examples; a process that does not know of the others has its part only."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4))
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * rng.normal(size=(ROWS, 1))
    return (job.part(x), job.part(y)) if job.alone else (x, y)


def found_late(job: Job, data: Any) -> Any:
    """Return a dataset whose end all processes but the first find late."""

    def is_kept(_: Any) -> Any:
        time.sleep(0.0 if job.is_chief else 0.3)
        return np.bool_(False)

    return data.concatenate(data.take(1).filter(lambda x, y: tf.numpy_function(is_kept, [x], tf.bool)))


def iterator(
    *,
    mode: str,
    replicas: int,
    initializable: bool = False,
    static: bool = False,
    epochs: int = 1,
    late: bool = False,
) -> Case:
    """Return the case of a graph that has its iterator inside; each epoch goes on until the data end."""

    def case(job: Job) -> Results:
        graph = tf.Graph()
        with graph.as_default():
            v1.set_random_seed(5)
            data = tf.data.Dataset.from_tensor_slices(examples(job)).shuffle(7)
            data = data.batch(2 if job.alone else 4, drop_remainder=static)
            data = found_late(job, data) if late else data
            make = v1.data.make_initializable_iterator if initializable else v1.data.make_one_shot_iterator
            source = make(data)
            x, y = source.get_next(name="next")
            w = v1.get_variable("w", initializer=np.zeros((4, 1)), use_resource=True)
            predicted = tf.identity(x @ w, name="predicted")
            loss = tf.reduce_mean(tf.square(predicted - y), name="loss")
            v1.train.AdamOptimizer(0.1).minimize(loss, name="train")
            starts = [source.initializer] if initializable else []
            tf.group(v1.variables_initializer(v1.global_variables(), name="variables"), name="init")
            tf.group(*starts, name="start")
        item = GraphItem.from_graph(
            graph,
            train_op=["train", "start"],
            outputs=["loss", "predicted", "next"],
            init_op="init",
            batch_inputs={"next": 0, "next:1": 0} if static else None,
        )
        new = ar.rewrite(item, job.config(mode, replicas)) if job.is_rewritten else item
        results, step = {}, 0
        with new.session() as session:
            session.run("init")
            for _ in range(epochs):
                session.run("start")
                try:
                    while True:
                        values = session.run(["loss", "predicted", "next", "train"])
                        results.update({f"{k} {step}": v for k, v in zip("lpn", values, strict=False)})
                        step += 1
                except tf.errors.OutOfRangeError:
                    pass
            results["variable w"] = session.read_variable("w")
        return {name: np.asarray(value) for name, value in results.items()}

    return case


def write_files(job: Job, x: Any, y: Any) -> list[str]:
    """Write examples into files of different length."""
    job.folder.mkdir(parents=True, exist_ok=True)
    ends = [0, 11, 14, len(x)]
    names = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        names.append(str(job.folder / f"{number}_of_{job.task}_{job.alone}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for row in range(begin, end):
                writer.write(np.append(x[row], y[row]).astype(np.float32).tobytes())
    return names


def files(job: Job) -> Results:
    """Fit a model on a pipeline that reads files, which every worker reads whole and shuffles alike."""
    model, (x, y) = models.built(job), models.data(job)
    names = write_files(job, x, y)
    data = tf.data.Dataset.from_tensor_slices(names).interleave(tf.data.TFRecordDataset, cycle_length=2)
    numbers = data.shuffle(9).batch(8).map(lambda raw: tf.io.decode_raw(raw, tf.float32), num_parallel_calls=2)
    pipeline = numbers.map(lambda rows: (rows[:, :4], tf.cast(rows[:, 4], tf.int32))).prefetch(1)
    # Where it does not know the length, Keras counts one step more per epoch, the one in which the data ended.
    pipeline = pipeline.apply(tf.data.experimental.assert_cardinality(-(-len(x) // 8)))
    losses = models.history(model, pipeline, epochs=2, validation_data=pipeline.take(2))
    return models.results_of(model, predicted=model.predict(pipeline.take(1).map(lambda x, y: x), verbose=0), **losses)


CASES: dict[str, Case] = {
    "iterator": iterator(mode="mirrored", replicas=1),
    "iterator_of_epochs": iterator(mode="shared", replicas=2, initializable=True, epochs=3),
    "iterator_static": iterator(mode="mirrored", replicas=1, static=True),
    "iterator_that_ends_late": iterator(mode="mirrored", replicas=1, static=True, late=True),
    "files": files,
}
