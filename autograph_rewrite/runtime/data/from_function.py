"""`ar.distribute_datasets_from_function`: each worker's own pipeline, made by a function that is told which part it is.

    dataset_fn(InputContext(2 pipelines, this is 1, 4 replicas))      batches of one replica
    worker 1 has replicas 2 and 3                                     two of them together are what its step is given

The batch of a step is what all workers hold together, in worker order; here each replica's part is one batch of the
function's. TensorFlow has this as `tf.distribute.Strategy.distribute_datasets_from_function`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.local_devices import with_local_devices
from autograph_rewrite.cluster.membership import Membership, in_job
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.errors import ClusterError, ConfigError, GraphError
from autograph_rewrite.plan.selected import chosen_config
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange
from autograph_rewrite.runtime.consensus.rendezvous import FIRST_KEY, Rendezvous
from autograph_rewrite.runtime.data.end_together import EndingTogether
from autograph_rewrite.runtime.data.rows import batch_size, is_batched
from autograph_rewrite.runtime.job import tf_server
from autograph_rewrite.runtime.job.tf_server import join
from autograph_rewrite.runtime.servers.serve import serve_if_server

_WHAT = "make datasets from a function"


def distribute_datasets_from_function(
    dataset_fn: Callable[[Any], Any], options: Any = None, *, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part; see `api.distribute_datasets_from_function`.

    Args:
        dataset_fn: takes a `tf.distribute.InputContext`, returns a `tf.data.Dataset` in batches of one replica.
        options: `tf.distribute.InputOptions`.
        config: names devices and job.
    """
    given, member = in_job(chosen_config(config))
    serve_if_server(member, given.timeout_seconds)
    given = with_local_devices(given)
    member = None if given.is_driven else member
    _require_per_worker(options)
    workers, task = (len(member.workers), member.task) if member is not None else (1, 0)
    local = len(given.replicas)
    if member is not None:
        join(member)
    context = tensorflow().distribute.InputContext(workers, task, workers * local)
    dataset = _checked(dataset_fn(context), options)
    size = _batch_size(dataset)
    if member is not None:
        _require_alike(member, given, local)
    dataset = dataset.rebatch(size * local) if local > 1 and size > 0 else dataset
    infinite = int(dataset.cardinality()) == tensorflow().data.INFINITE_CARDINALITY
    return dataset if member is None or infinite else EndingTogether(dataset, member, _connection(member, given))


def _require_per_worker(options: Any) -> None:
    """Refuse a pipeline for each replica: a step is given what all replicas of its process have.

    Raises:
        ConfigError: the options ask for that.
    """
    mode = getattr(options, "experimental_replication_mode", None)
    if getattr(mode, "name", "PER_WORKER") == "PER_REPLICA":
        raise ConfigError(
            "a pipeline for each replica (InputReplicationMode.PER_REPLICA) is not available",
            hint="leave it out: the function is called once in each worker",
        )


def _checked(dataset: Any, options: Any) -> Any:
    """Return a dataset that has batches, and none that no device can be given ahead of time.

    Raises:
        GraphError: the function has returned something else.
    """
    tf = tensorflow()
    if not isinstance(dataset, tf.data.Dataset):
        raise GraphError(
            f"the function has returned a {type(dataset).__name__}", hint="return a tf.data.Dataset of batches"
        )
    if not is_batched(dataset):
        raise GraphError(
            "the function has returned single examples, of which a replica cannot be given a batch",
            hint="call dataset.batch(context.get_per_replica_batch_size(global_batch_size))",
        )
    composite = [leaf for leaf in tf.nest.flatten(dataset.element_spec) if not isinstance(leaf, tf.TensorSpec)]
    if composite and getattr(options, "experimental_fetch_to_device", None):
        raise GraphError(
            f"{type(composite[0]).__name__.removesuffix('Spec')}s cannot be fetched to a device ahead of time",
            hint="set experimental_fetch_to_device=False",
        )
    return dataset


def _batch_size(dataset: Any) -> int:
    """Return how many examples a replica is given; 0 where there are none at all."""
    tf = tensorflow()
    stated = int(tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset)))
    if stated >= 0:
        return stated
    with suppress(tf.errors.OutOfRangeError):
        for batch in dataset.take(1):
            return int(batch_size(batch))
    return 0


def _require_alike(member: Membership, given: Config, local: int) -> None:
    """Make sure that all workers have as many replicas.

    Raises:
        ClusterError: they have not.
    """
    counts = Rendezvous(member, given.timeout_seconds).rows(np.array([local], np.int64), _WHAT)[:, 0]
    if (counts != counts[0]).any():
        raise ClusterError(
            f"the workers have different numbers of replicas: {', '.join(map(str, counts))}",
            hint="give each worker as many devices",
        )


def _connection(member: Membership, given: Config) -> Callable[[Array], Exchange]:
    channel = tf_server.next_channel()
    return lambda like: Exchange(member, given.timeout_seconds, like, FIRST_KEY + channel, FIRST_KEY)
