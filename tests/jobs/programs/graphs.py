"""Session mode: graphs that several processes train, each on its part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.jobs.programs.job import Case, Job, Results
from tests.support.training import make_item, placeholder, v1, variable
from tests.zoo import ZOO

SIZES = (8, 7, 1, 11)
"""Even and uneven batches, and one of which all workers but one get nothing."""
LOPSIDED = 3
"""The step in which the last worker gets the whole batch."""


def train(
    job: Job,
    item: GraphItem,
    feeds: Iterable[Mapping[str, Any]],
    mode: str,
    replicas: int,
    train_op: str | None = None,
) -> Results:
    """Train; return the outputs of all steps and the variables, whatever the process."""
    new = ar.rewrite(item, job.config(mode, replicas)) if job.is_rewritten else item
    results = {}
    with new.session() as session:
        session.run(new.init_op)
        for step, feed in enumerate(feeds):
            values = session.run([*item.outputs, *item.targets], feed)
            outputs = zip(item.outputs, values, strict=False)
            results.update({f"{name} of step {step}": np.asarray(value) for name, value in outputs})
        results |= {f"variable {name}": value for name, value in session.read_variables().items()}
    return results


def zoo(
    name: str,
    optimizer: str = "sgd",
    mode: str = "mirrored",
    replicas: int = 1,
    batch: int | None = None,
    sizes: Sequence[int] = SIZES,
) -> Case:
    """Return the case of a zoo entry."""

    def case(job: Job) -> Results:
        local = batch if job.is_rewritten or job.count == 1 or batch is None else job.limits(batch)[1]
        built = ZOO[name].build(optimizer=optimizer, batch=local)
        inputs = built.batch_inputs
        item = GraphItem.from_graph(
            built.graph,
            train_op=built.train_op,
            outputs=list(built.outputs),
            init_op=built.init_op,
            batch_inputs=dict(inputs),
        )

        def feeds() -> Iterable[Mapping[str, Any]]:
            for step, size in enumerate([batch] * 3 if batch else sizes):
                whole = built.feeds(step, size)
                lopsided = step == LOPSIDED and not job.alone
                yield {
                    key: job.part(value, inputs[key[:-2]], lopsided=lopsided) if key[:-2] in inputs else value
                    for key, value in whole.items()
                }

        return train(job, item, feeds(), mode, replicas)

    return case


def small(
    forward: Callable[[], Mapping[str, Any]],
    *,
    mode: str = "shared",
    replicas: int = 1,
    sizes: Sequence[int] = (8, 7, 1, 5),
    width: int = 4,
) -> Case:
    """Return the case of a small graph with one input `x`, trained by gradient descent."""

    def case(job: Job) -> Results:
        item = make_item(forward, batch_inputs={"x": 0})
        rng = np.random.default_rng(0)
        whole = [rng.normal(size=(size, width)) for size in sizes]
        return train(job, item, [{"x": job.part(x)} for x in whole], mode, replicas)

    return case


def in_micro_batches(case: Case, form: str = "unrolled") -> Case:
    """Return a case in which each replica takes its part of the batch in three pieces."""
    more = {"microbatches": 3, "accumulation": {"form": form}}
    return lambda job: case(replace(job, more=more))


def on_a_server(name: str, case: Case) -> Case:
    """Return a case in which a server keeps one variable, whatever the strategy does with the others."""
    more = {"variables": [{"match": name, "synchronizer": "ps"}]}
    return lambda job: case(replace(job, more=more))


def contrastive() -> Mapping[str, Any]:
    """Compare every example with every other one: the batch is wanted whole."""
    x = placeholder("x", None, 4)
    y = tf.tanh(x @ variable("w", np.linspace(-1, 1, 12).reshape(4, 3)))
    likeness = tf.matmul(x, x, transpose_b=True) + tf.matmul(y, y, transpose_b=True)
    return {"loss": tf.reduce_mean(tf.reduce_logsumexp(likeness, 1)), "likeness": likeness}


def two_views() -> Mapping[str, Any]:
    """Encode two views of each example at once, and compare those of one with all of the other."""
    x = placeholder("x", None, 4)
    both = tf.tanh(tf.concat([x, tf.sin(x)], 0) @ variable("w", np.linspace(-1, 1, 12).reshape(4, 3)))
    one, two = tf.split(both, 2)
    likeness = tf.matmul(one, two, transpose_b=True)
    return {"loss": tf.reduce_mean(tf.reduce_logsumexp(likeness, 1)), "both": both, "running": tf.cumsum(both)}


def unknown_counts() -> Mapping[str, Any]:
    """Keep the examples that fulfil a condition: nobody knows beforehand how many there are."""
    x = placeholder("x", None, 4)
    kept = tf.boolean_mask(x, x[:, 0] > 0)
    y = kept @ variable("w", np.linspace(-1, 1, 12).reshape(4, 3))
    loss = tf.reduce_sum(tf.sigmoid(y)) / tf.cast(1 + tf.shape(kept)[0], tf.float64)
    return {"loss": loss, "kept": kept, "y": y, "order": tf.argsort(y[:, 0]), "count": tf.shape(kept)[0]}


def noise() -> Mapping[str, Any]:
    """Begin with noise for each example, as generators do: its rows are divided, and all workers use the same draw."""
    x = placeholder("x", None, 4)
    drawn = v1.random_normal([tf.shape(x)[0], 4], seed=3, dtype=tf.float64)
    made = tf.tanh(drawn @ variable("w", np.linspace(-1, 1, 16).reshape(4, 4)))
    return {"loss": tf.reduce_mean(tf.square(made - x)), "made": made}


def types() -> Mapping[str, Any]:
    """Return values of many types, per example (gathered) and for the whole batch (combined)."""
    x = placeholder("x", None, 4)
    w = variable("w", np.linspace(-1, 1, 12).reshape(4, 3))
    y = x @ w
    small = tf.cast(tf.round(30 * y), tf.int8)
    pair = tf.complex(y, 2 * y)
    results = {
        "loss": tf.reduce_mean(tf.square(y)),
        "bool": y > 0,
        "int8": small,
        "uint8": tf.cast(tf.abs(y) * 9, tf.uint8),
        "int16": tf.cast(100 * y, tf.int16),
        "uint32": tf.cast(tf.abs(y) * 1000, tf.uint32),
        "half": tf.cast(y, tf.float16),
        "bfloat16": tf.cast(tf.cast(y, tf.bfloat16), tf.float32),
        "complex": pair,
        "complex64": tf.cast(pair, tf.complex64),
        "all": tf.reduce_all(y > -3, 0),
        "any": tf.reduce_any(y > 3, 0),
        "max int8": tf.reduce_max(small, 0),
        "min": tf.reduce_min(y),
        "prod": tf.reduce_prod(1 + 0.1 * y, 0),
        "sum complex": tf.reduce_sum(pair, 0),
        "sum int8": tf.reduce_sum(small, 0),
        "text": tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(tf.strings.as_string(small), 0), 10**9),
        "sum int64": tf.reduce_sum(tf.cast(small, tf.int64)),
    }
    return {name.replace(" ", "_"): value for name, value in results.items()}


def unseeded(job: Job) -> Results:
    """Draw initial values and dropout masks without any seed: workers differ from run to run, never from each other."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float64, (None, 40), name="x")
        kernels = [
            v1.get_variable(name, (40, 5), tf.float64, v1.glorot_normal_initializer(), use_resource=True)
            for name in ("one", "two")
        ]
        dropped = tf.nn.dropout(x, 0.5)
        loss = tf.identity(tf.reduce_mean(tf.square(dropped @ (kernels[0] + kernels[1]))), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.identity(dropped, name="dropped")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(
        graph, train_op="train", outputs=["loss", "dropped"], init_op="init", batch_inputs={"x": 0}
    )
    whole = np.random.default_rng(0).normal(size=(6, 40))
    return train(job, item, [{"x": job.part(whole)}] * 3, "mirrored", 1)


CASES: dict[str, Case] = {
    "mlp_adam_mirrored": zoo("mlp", "adam"),
    "mlp_adam_shared_two_devices": zoo("mlp", "adam", "shared", 2),
    "mlp_static_batch": zoo("mlp", "adam", "mirrored", 2, batch=9),
    "language_model_mirrored": zoo("language_model", "adagrad"),
    "language_model_shared_two_devices": zoo("language_model", "adagrad", "shared", 2),
    "lstm_v1_shared_two_devices": zoo("lstm_v1", "adam", "shared", 2),
    "masked": zoo("masked", "momentum", "mirrored", 2),
    "cond_v1": zoo("cond_v1", "adam", "shared", 2),
    "mlp_in_micro_batches": in_micro_batches(zoo("mlp", "adam", "mirrored", 2)),
    "mlp_next_to_a_server": on_a_server("hidden_1/w", zoo("mlp", "adam")),
    "masked_in_micro_batches": in_micro_batches(zoo("masked", "momentum"), "loop"),
    "language_model_in_micro_batches": in_micro_batches(zoo("language_model", "adagrad", "mirrored", 2), "loop"),
    "contrastive_in_micro_batches": in_micro_batches(small(contrastive, mode="mirrored", replicas=2)),
    "contrastive": small(contrastive, replicas=2),
    "two_views": small(two_views, replicas=2),
    "two_views_mirrored": small(two_views, mode="mirrored"),
    "unknown_counts": small(unknown_counts),
    "noise": small(noise, replicas=2),
    "types": small(types, replicas=2),
    "unseeded": unseeded,
}
