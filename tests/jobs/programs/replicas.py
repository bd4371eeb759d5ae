"""Two workers of two replicas each: their numbers, policies of variables, tables and data; `replicas.py OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs.job import Job
from tests.jobs.programs.worker import split_cpu

JOB = Job.here(Path(sys.argv[1]))
split_cpu(2)
MODE = os.environ.get("JOB_MODE", "mirrored")
NAMES = {"written": ("on_write", "mean"), "read": ("on_read", "sum"), "first": ("on_write", "only_first_replica")}
POLICIES = [{"match": n, "synchronization": when, "aggregation": how} for n, (when, how) in NAMES.items()]
CONFIG = {
    **JOB.config(replicas=2),
    "strategy": {"name": "AllReduce", "variables": MODE},
    "variable_policies": POLICIES,
    "timeout_seconds": 20,
}
w = tf.Variable([[1.0]], name="w")
kept = {name: tf.Variable(0.0, trainable=False, name=name) for name in NAMES}
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0]), 0.0)


def step(x: Any, words: Any) -> Any:
    """Train, and return what each replica and each worker sees."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    for variable in kept.values():
        variable.assign_add(tf.cast(ar.replica_id() + 1, tf.float32))
    rows = tf.shape(x)[0]
    return {
        "ids": tf.fill([rows], ar.replica_id()),
        "components": tf.fill([rows], kept["read"]),
        "found": table.lookup(tf.strings.lower(words)),
        "gathered": ar.all_gather(ar.replica_id()[None]),
    }


def dataset_fn(context: Any) -> Any:
    """Return this worker's examples, in batches of a replica."""
    own = tf.data.Dataset.range(10 - 4 * context.input_pipeline_id)
    own = own.map(lambda i: 100 * context.input_pipeline_id + i)
    return own.batch(context.get_per_replica_batch_size(8))


def main() -> None:
    """Train, and write down what this worker has found."""
    distributed = ar.distribute(step, CONFIG, tf.TensorSpec([None, 1]), tf.TensorSpec([None], tf.string))
    words = np.array(["A", "b"])
    outputs = distributed(np.ones([2, 1], np.float32), words)
    found = {name: np.asarray(value).tolist() for name, value in outputs.items()}
    found |= {name: float(variable) for name, variable in kept.items()}
    kept["read"].assign(20.0)
    found["shared out"] = distributed(np.ones([2, 1], np.float32), words)["components"].numpy().tolist()
    data = ar.distribute_datasets_from_function(dataset_fn, config=CONFIG)
    found["data"] = [batch.numpy().tolist() for batch in data]
    (JOB.folder / f"worker{JOB.task}.json").write_text(json.dumps(found))


main()
