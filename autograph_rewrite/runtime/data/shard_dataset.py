"""`ar.shard_dataset`: this worker's shard of a tf.data pipeline that all workers build alike.

    batches of 8     worker 0   rows 0 1 2 of each          DATA: every worker reads everything
    for 3 workers    worker 1   rows 3 4 5
                     worker 2   rows 6 7

    files a b c d    worker 0   3 rows at a time of a d     FILE: every worker reads its own files, and who has no
    for 3 workers    worker 1   3 rows at a time of b       more gives empty batches until all have ended
                     worker 2   2 rows at a time of c

The batch of a step is what all workers hold together, in worker order. With DATA it is that of the pipeline itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership, in_job
from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.errors import ClusterError, ConfigError, GraphError
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.plan.selected import chosen_config
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange
from autograph_rewrite.runtime.consensus.rendezvous import FIRST_KEY, Rendezvous
from autograph_rewrite.runtime.data.end_together import EndingTogether
from autograph_rewrite.runtime.data.rows import batch_size, checksum, is_batched, rows
from autograph_rewrite.runtime.elastic.own_loop import OwnLoop
from autograph_rewrite.runtime.job import tf_server
from autograph_rewrite.runtime.job.tf_server import join
from autograph_rewrite.runtime.servers.serve import serve_if_server

_POLICIES = ("AUTO", "FILE", "DATA", "OFF")
_SPLIT = "split a dataset"


def shard_dataset(
    dataset: Any, global_batch_size: int | None = None, *, policy: Any = None, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part of a dataset; see `api.shard_dataset`.

    Args:
        dataset: a `tf.data.Dataset`.
        global_batch_size: examples of a step on all workers together; None: it is batched already.
        policy: an `AutoShardPolicy`; None: the dataset's own.
        config: names the job.
    """
    if global_batch_size is not None:
        dataset = dataset.batch(global_batch_size)
    given, member = in_job(chosen_config(config))
    serve_if_server(member, given.timeout_seconds)
    chosen = _policy(dataset, policy)
    loop = OwnLoop.here()
    if loop is not None and tensorflow().executing_eagerly():
        _require_the_same_batches(chosen)
        part, sharding = dataset, None
        if member is not None and not given.is_driven:
            join(member)
            sharding = _Sharding(member, given.timeout_seconds, dataset, is_told=config is not None)
            part = sharding.by("DATA")
        ends = int(dataset.cardinality()) != tensorflow().data.INFINITE_CARDINALITY
        return loop.batches(part, ends=ends, failed=sharding.failed if sharding is not None else None)
    if member is None or given.is_driven:
        return dataset
    if not is_batched(dataset):
        raise GraphError(
            "the dataset gives single examples, of which a worker cannot take a part",
            hint="call dataset.batch(global_batch_size), or pass global_batch_size",
        )
    if not tensorflow().executing_eagerly():
        return _in_graph(dataset, chosen)
    join(member)
    return _Sharding(member, given.timeout_seconds, dataset, is_told=config is not None).by(chosen)


def _require_the_same_batches(policy: str) -> None:
    if policy in ("FILE", "OFF"):
        raise ConfigError(
            f"in an elastic job a dataset cannot be split by the policy {policy}: the batches would be others "
            "for every number of workers",
            hint="use the policy DATA: every worker reads everything, and takes its rows of every batch",
        )


def _policy(dataset: Any, policy: Any) -> str:
    """Return the name of the policy that is asked for, here or in the dataset's options.

    Raises:
        ConfigError: there is no such policy, or none that can be followed here.
    """
    if policy is None:
        policy = dataset.options().experimental_distribute.auto_shard_policy
    name = str(getattr(policy, "name", policy)).upper()
    if name not in _POLICIES:
        raise ConfigError(f"there is no policy '{policy}' to split a dataset by", hint=f"choose {', '.join(_POLICIES)}")
    return name


def _in_graph(dataset: Any, policy: str) -> Any:
    """Return a dataset inside a graph: rewriting that takes the part of what its iterator gives."""
    if policy in ("FILE", "OFF"):
        raise ConfigError(
            f"inside a graph a dataset cannot be split by the policy {policy}: nobody sees when a worker's data end",
            hint="leave it whole, so that each worker takes its part of every batch; or give each worker its own data "
            "with dataset.shard(...), repeated, and set input: per_worker",
        )
    return dataset


class _Sharding:
    """Splits one dataset among the workers.

    Args:
        member: this process.
        seconds: how long to wait for the others.
        dataset: batched.
        is_told: the program says so here; else as long as what it distributes waits, once it does.
    """

    def __init__(self, member: Membership, seconds: float, dataset: Any, *, is_told: bool) -> None:
        self._tf = tensorflow()
        self._member = member
        self._default, self._is_told = seconds, is_told
        self._problem: ClusterError | None = None
        self._dataset = dataset
        self._workers = len(member.workers)
        self._channel = tf_server.next_channel()

    @property
    def _seconds(self) -> float:
        return self._default if self._is_told else tf_server.patience(self._default)

    def failed(self) -> ClusterError | None:
        """Return why the first batches could not be compared: TensorFlow tells no more than its text."""
        return self._problem

    def by(self, policy: str) -> Any:
        """Return this worker's part.

        Raises:
            ClusterError: the workers have different datasets, or somebody is missing.
            GraphError: the policy does not fit the dataset.
        """
        stated = int(self._tf.raw_ops.ComputeBatchSize(input_dataset=self._variant(self._dataset)))
        files = self._of_own_files() if policy in ("AUTO", "FILE") else None
        own = self._dataset if policy == "OFF" else files
        # Looking at the first batch of what is split by rows would shuffle it anew: one process does not do that.
        seen = self._first_size(own) if own is not None else 0
        mine = [stated, _POLICIES.index(policy), own is not None, seen]
        table = Rendezvous(self._member, self._seconds).rows(np.array(mine, np.int64), _SPLIT)
        if (table[:, :3] != table[0, :3]).any():
            raise ClusterError(
                "the workers split datasets of different batch sizes, or by different policies",
                hint="build the dataset with the global batch size in every worker, and split it by the same policy",
            )
        if own is not None:
            if policy != "OFF" and not table[:, 3].all():
                raise GraphError(
                    f"there are fewer files than the {self._workers} workers, or one without examples",
                    hint="split the rows of each batch instead: policy='DATA'",
                )
            return self._in_batches_of_parts(own, stated if stated >= 0 else int(table[:, 3].max()))
        if policy == "FILE":
            raise GraphError(
                "the dataset reads no files, so it cannot be split by them",
                hint="TFRecordDataset, TextLineDataset and the like read files; the policy DATA splits any dataset",
            )
        return self._rows_of_each_batch()

    def _first_size(self, dataset: Any) -> int:
        """Return the size of the first batch: where something follows on batch(...), TensorFlow does not know it."""
        with suppress(self._tf.errors.InvalidArgumentError):  # TensorFlow's, of a worker without a file
            for batch in dataset.take(1):
                return int(batch_size(batch))
        return 0

    def _variant(self, dataset: Any) -> Any:
        return self._tf.data.experimental.to_variant(dataset)

    def _of_own_files(self) -> Any:
        """Return what TensorFlow makes of the pipeline for this worker's files; None if it reads none."""
        tf, spec = self._tf, self._dataset.element_spec
        leaves = tf.nest.flatten(spec)
        dense = [leaf if isinstance(leaf, tf.TensorSpec) else tf.TensorSpec(None, tf.variant) for leaf in leaves]
        try:
            variant = tf.raw_ops.AutoShardDataset(
                input_dataset=self._variant(self._dataset),
                num_workers=self._workers,
                index=self._member.task,
                auto_shard_policy=tf.data.experimental.AutoShardPolicy.FILE.value,
                output_types=[leaf.dtype for leaf in dense],
                output_shapes=[leaf.shape for leaf in dense],
            )
        except tf.errors.NotFoundError:  # it reads none
            return None
        return tf.data.experimental.from_variant(variant, spec)

    def _in_batches_of_parts(self, dataset: Any, size: int) -> Any:
        """Return this worker's own examples in batches of its part's size, with empty ones until all have ended."""
        if size < self._workers:
            raise GraphError(
                f"the dataset has batches of {size}, of which {self._workers} workers cannot have a part each",
                hint="call dataset.batch(global_batch_size) with at least one example for each worker",
            )
        ends = bounds(size, self._workers)
        own = dataset.rebatch(ends[self._member.task + 1] - ends[self._member.task])
        if int(self._dataset.cardinality()) == self._tf.data.INFINITE_CARDINALITY:
            return own
        return EndingTogether(own, self._member, self._exchange)

    def _rows_of_each_batch(self) -> Any:
        """Return this worker's rows of every batch; the first batch of each iteration is compared with the others'."""
        tf, task, workers = self._tf, self._member.task, self._workers

        def compare(*numbers: Any) -> bool:
            mine = np.zeros(workers, np.int64)
            mine[task] = checksum(numbers)
            try:
                with self._exchange(mine) as exchange:
                    all_of_them = exchange.add_up(mine, "compare the first batch of a dataset")
            except ClusterError as error:
                self._problem = error
                raise
            if (all_of_them != all_of_them[0]).any():
                raise ClusterError(
                    "the workers' datasets do not begin with the same batch, of which each is to take its part",
                    hint="read the same files in the same order, and shuffle with a seed; or give each worker its own "
                    "data with the policy OFF",
                )
            return True

        def part(index: Any, batch: Any) -> Any:
            leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf.dtype != tf.variant]
            alike = tf.cond(index == 0, lambda: tf.py_function(compare, leaves, tf.bool), lambda: True)
            with tf.control_dependencies([alike]):
                return rows(batch, workers, task)

        return self._dataset.enumerate().map(part)

    def _exchange(self, like: Array) -> Exchange:
        return Exchange(self._member, self._seconds, like, FIRST_KEY + self._channel, FIRST_KEY)
