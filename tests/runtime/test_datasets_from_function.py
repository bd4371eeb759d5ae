"""`ar.distribute_datasets_from_function` in one process: what the function is told, and what becomes of its batches."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, GraphError

CONFIG = {"devices": ["CPU:0", "CPU:1"]}


def of_context(context: Any) -> Any:
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 2)
    return tf.data.Dataset.range(7).batch(context.get_per_replica_batch_size(4))


def test_batches_of_replicas_are_put_together_for_a_step() -> None:
    found = [batch.numpy().tolist() for batch in ar.distribute_datasets_from_function(of_context, config=CONFIG)]
    assert found == [[0, 1, 2, 3], [4, 5, 6]]


def test_the_size_of_batches_may_be_open() -> None:
    def ragged_end(context: Any) -> Any:
        return of_context(context).map(lambda x: tf.boolean_mask(x, x >= 0))

    found = [batch.numpy().tolist() for batch in ar.distribute_datasets_from_function(ragged_end, config=CONFIG)]
    assert found == [[0, 1, 2, 3], [4, 5, 6]]


def test_replicas_are_given_the_batches_in_their_order() -> None:
    w = tf.Variable([[1.0]])

    def step(x: Any) -> Any:
        rows = tf.cast(x, tf.float32)[:, None]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows @ w) ** 2)
        w.assign_sub(0.0 * tape.gradient(loss, w))
        return x * 10 + tf.cast(ar.replica_id(), tf.int64)

    step = ar.distribute(step, CONFIG, tf.TensorSpec([None], tf.int64))
    data = ar.distribute_datasets_from_function(of_context, config=CONFIG)
    assert [step(x).numpy().tolist() for x in data] == [[0, 10, 21, 31], [40, 50, 61]]


@pytest.mark.parametrize(
    ("made", "options", "error", "text"),
    [
        (lambda: tf.data.Dataset.range(4), {}, GraphError, "call dataset.batch"),
        (lambda: [1, 2], {}, GraphError, "returned a list"),
        (
            lambda: tf.data.Dataset.range(4).batch(2),
            {"experimental_replication_mode": tf.distribute.InputReplicationMode.PER_REPLICA},
            ConfigError,
            "PER_REPLICA",
        ),
        (
            lambda: tf.data.Dataset.range(4).map(lambda x: tf.ones([x])).ragged_batch(2),
            {"experimental_fetch_to_device": True},
            GraphError,
            "experimental_fetch_to_device=False",
        ),
    ],
    ids=["single examples", "no dataset", "per replica", "ragged"],
)
def test_what_cannot_be_given_to_replicas_is_refused(
    made: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ar.distribute_datasets_from_function(lambda _: made(), tf.distribute.InputOptions(**options), config=CONFIG)


def test_ragged_batches_may_stay_on_the_host() -> None:
    def made(_: Any) -> Any:
        return tf.data.Dataset.range(4).map(lambda x: tf.ones([x])).ragged_batch(1)

    assert len(list(ar.distribute_datasets_from_function(made, config=CONFIG))) == 2
