"""`ar.shard_dataset`: take this worker's shard of a tf.data pipeline that all workers build alike.

    batches of 8     worker 0   rows 0 1 2 of each          DATA: every worker reads everything
    for 3 workers    worker 1   rows 3 4 5
                     worker 2   rows 6 7

    files a b c d    worker 0   3 rows at a time of a d     FILE: every worker reads its own files, and who has no
    for 3 workers    worker 1   3 rows at a time of b       more gives empty batches until all have ended
                     worker 2   2 rows at a time of c

The batch of a step consists of the parts of all workers, in worker order. With DATA it is the pipeline's batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership, with_local_devices
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.errors import ClusterError, ConfigError, GraphError
from autograph_rewrite.plan.parts.batch_split import block_begin, bounds
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.digests import described
from autograph_rewrite.runtime.job.exchanges import FIRST_KEY, Array, Rendezvous, RepeatedSum, table_of
from autograph_rewrite.runtime.job.own_loop import OwnLoop
from autograph_rewrite.runtime.job.parameter_server import take_part
from autograph_rewrite.runtime.job.tf_server import counts, join, patience

_POLICIES = ("AUTO", "FILE", "DATA", "OFF")


def shard_dataset(
    dataset: Any, global_batch_size: int | None = None, *, policy: Any = None, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part of a dataset; see `api.shard_dataset`.

    Args:
        global_batch_size: examples of a step on all workers together; None: the dataset is batched already.
        policy: an `AutoShardPolicy`; None: the dataset's own.
    """
    if global_batch_size is not None:
        dataset = dataset.batch(global_batch_size)
    given, member = take_part(config)
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
    """Return the name of a policy, or of the policy in the dataset's options.

    Raises:
        ConfigError: there is no policy of this name.
    """
    if policy is None:
        policy = dataset.options().experimental_distribute.auto_shard_policy
    name = str(getattr(policy, "name", policy)).upper()
    if name not in _POLICIES:
        raise ConfigError(f"there is no policy '{policy}' to split a dataset by", hint=f"choose {', '.join(_POLICIES)}")
    return name


def _in_graph(dataset: Any, policy: str) -> Any:
    """Return a dataset inside a graph unchanged: the rewrite slices the batches of its iterator."""
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
        seconds: how long to wait for the others.
        is_told: whether the program gives `seconds` for this dataset; else the program's timeout counts once known.
    """

    def __init__(self, member: Membership, seconds: float, dataset: Any, *, is_told: bool) -> None:
        self._tf = tensorflow()
        self._member, self._workers = member, len(member.workers)
        self._default, self._is_told = seconds, is_told
        self._problem: ClusterError | None = None
        self._dataset = dataset
        self._exchange = _connection(member, lambda: self._seconds)

    @property
    def _seconds(self) -> float:
        return self._default if self._is_told else patience(self._default)

    def failed(self) -> ClusterError | None:
        """Return the error of the comparison of first batches, of which TensorFlow keeps only the text."""
        return self._problem

    def by(self, policy: str) -> Any:
        """Return this worker's part.

        Raises:
            ClusterError: the workers have different datasets, or a worker is missing.
            GraphError: the policy does not fit the dataset.
        """
        stated = _stated_size(self._dataset)
        files = self._of_own_files() if policy in ("AUTO", "FILE") else None
        own = self._dataset if policy == "OFF" else files
        # Not for a dataset that is split by rows: to draw its first batch would shuffle it once more than one process.
        seen = 0
        with suppress(self._tf.errors.InvalidArgumentError):  # TensorFlow raises it for a worker without a file
            seen = _first_size(own) if own is not None else 0
        mine = [stated, _POLICIES.index(policy), own is not None, seen]
        table = Rendezvous(self._member, self._seconds).rows(np.array(mine, np.int64), "split a dataset")
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

    def _of_own_files(self) -> Any:
        """Return TensorFlow's pipeline over this worker's files; None if the dataset reads none."""
        tf, spec = self._tf, self._dataset.element_spec
        leaves = tf.nest.flatten(spec)
        dense = [leaf if isinstance(leaf, tf.TensorSpec) else tf.TensorSpec(None, tf.variant) for leaf in leaves]
        try:
            variant = tf.raw_ops.AutoShardDataset(
                input_dataset=tf.data.experimental.to_variant(self._dataset),
                num_workers=self._workers,
                index=self._member.task,
                auto_shard_policy=tf.data.experimental.AutoShardPolicy.FILE.value,
                output_types=[leaf.dtype for leaf in dense],
                output_shapes=[leaf.shape for leaf in dense],
            )
        except tf.errors.NotFoundError:  # the dataset reads no files
            return None
        return tf.data.experimental.from_variant(variant, spec)

    def _in_batches_of_parts(self, dataset: Any, size: int) -> Any:
        """Return this worker's examples in batches of its part's size, then empty batches until all workers end."""
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
            contents = zlib.crc32("".join(map(described, numbers)).encode())
            mine = table_of(self._member, np.array(contents, np.int64))
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


# `ar.distribute_datasets_from_function`: a pipeline for each worker, made by a function that is told which part it is.
#
#     dataset_fn(InputContext(2 pipelines, this is 1, 4 replicas))      batches of one replica
#     worker 1 has replicas 2 and 3                                     two of them together are what its step is given
#
# The batch of a step consists of the parts of all workers, in worker order; here each replica's part is one batch of
# the function's dataset. TensorFlow's version is `tf.distribute.Strategy.distribute_datasets_from_function`.


def distribute_datasets_from_function(
    dataset_fn: Callable[[Any], Any], options: Any = None, *, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part; see `api.distribute_datasets_from_function`.

    Args:
        dataset_fn: takes a `tf.distribute.InputContext`, returns a `tf.data.Dataset` in batches of one replica.
    """
    given, member = take_part(config)
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
    if member is None or infinite:
        return dataset
    return EndingTogether(dataset, member, _connection(member, lambda: given.timeout_seconds))


def _require_per_worker(options: Any) -> None:
    """Refuse a pipeline for each replica: a step takes one batch for all replicas of its process."""
    mode = getattr(options, "experimental_replication_mode", None)
    if getattr(mode, "name", "PER_WORKER") == "PER_REPLICA":
        raise ConfigError(
            "a pipeline for each replica (InputReplicationMode.PER_REPLICA) is not available",
            hint="leave it out: the function is called once in each worker",
        )


def _checked(dataset: Any, options: Any) -> Any:
    """Return the dataset of a user's function, checked.

    Raises:
        GraphError: it is no dataset of batches, or has sparse or ragged parts that were to be fetched to a device.
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
    """Return the size of a replica's batch; 0 for an empty dataset."""
    stated = _stated_size(dataset)
    return stated if stated >= 0 else _first_size(dataset)


def _stated_size(dataset: Any) -> int:
    """Return the static batch size that TensorFlow infers; a negative number if it is unknown."""
    tf = tensorflow()
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset)))


def _first_size(dataset: Any) -> int:
    """Return the size of the first batch; 0 without one."""
    return next((int(batch_size(batch)) for batch in dataset.take(1)), 0)


def _require_alike(member: Membership, given: Config, local: int) -> None:
    """Refuse workers with different numbers of replicas."""
    job = Rendezvous(member, given.timeout_seconds)
    counts = job.rows(np.array(local, np.int64), "make datasets from a function")
    if (counts != counts[0]).any():
        raise ClusterError(
            f"the workers have different numbers of replicas: {', '.join(map(str, counts))}",
            hint="give each worker as many devices",
        )


def _connection(member: Membership, seconds: Callable[[], float]) -> Connect:
    channel = next(counts().channels)
    return lambda like: RepeatedSum(member, seconds(), like, FIRST_KEY + channel, FIRST_KEY)


# Pad exhausted workers with empty batches until the datasets of all workers end.
#
#     worker 0   a  b  c  .          before each batch all tell each other whether they have one;
#     worker 1   d  .  .  .          the first time that nobody has, all end
#
# An empty batch has no rows, and the same length in each open dimension as a batch of another worker.
# The exchange is in the program's thread, between its steps. A tf.data pipeline may run ahead in other threads: it
# would ask for a batch that the program never takes, and wait for the others for ever.

Connect = Callable[[Array], RepeatedSum]


class EndingTogether:
    """One worker's batches of a dataset, padded with empty ones; all workers must iterate over it equally often.

    Args:
        connect: makes an exchange between the workers, of arrays like a given one.

    Attributes:
        dataset: this worker's part, without padding.
    """

    def __init__(self, dataset: Any, member: Membership, connect: Connect) -> None:
        self.dataset = dataset
        self.element_spec = dataset.element_spec
        self._member = member
        self._connect = connect
        self._exchange: RepeatedSum | None = None
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        iteration = self._iterations
        own = iter(self.dataset)
        batch, number, last = next(own, None), 0, None
        while (sizes := self._of_somebody(batch, iteration, number)) is not None:
            if batch is not None:
                last = batch
                yield batch
                batch = next(own, None)
            else:
                yield none_of(self.element_spec, sizes, last)
            number += 1

    def _of_somebody(self, batch: Any, iteration: int, number: int) -> list[int] | None:
        """Tell the others whether there is another batch; return the lengths of any worker's, None if all end.

        Raises:
            ClusterError: another worker asks for another batch, or a worker is missing.
        """
        mine = [iteration, number, batch is not None, *lengths(batch, self.element_spec)]
        table = table_of(self._member, np.array(mine, np.int64))
        if self._exchange is None:
            self._exchange = self._connect(table)
        table = self._exchange.add_up(table, "tell whether they have another batch")
        if (table[:, :2] != table[0, :2]).any():
            at = ", ".join(f"worker {task}: {n + 1} of time {i}" for task, (i, n) in enumerate(table[:, :2].tolist()))
            raise ClusterError(
                f"the workers want different batches of a dataset ({at})",
                hint="all have to iterate over it equally often, and to leave it early at the same batch",
            )
        having = table[table[:, 2] > 0]
        return [int(size) for size in having[0, 3:]] if len(having) else None


# Row operations on batches of a tf.data pipeline: their number, one worker's slice, the empty slice.


def is_batched(dataset: Any) -> bool:
    """Return whether all tensors of a dataset have a dimension that can count examples."""
    leaves = tensorflow().nest.flatten(dataset.element_spec)
    ranks = [leaf.shape.rank for leaf in leaves]
    return bool(ranks) and all(rank is None or rank > 0 for rank in ranks)


def batch_size(batch: Any) -> Any:
    """Return how many examples a batch has."""
    return _size(tensorflow().nest.flatten(batch)[0])


def rows(batch: Any, workers: int, task: int) -> Any:
    """Return one worker's part of a batch: contiguous rows; if they do not divide, the first workers get one more.

    Args:
        batch: nested tensors whose dimension 0 counts examples.
    """
    return tensorflow().nest.map_structure(lambda leaf: _rows(leaf, workers, task), batch)


def _rows(leaf: Any, workers: int, task: int) -> Any:
    tf = tensorflow()
    if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) or leaf.shape[0] is None:
        return _between(leaf, *_limits(_size(leaf), workers, task))
    ends = bounds(leaf.shape[0], workers)
    return leaf[ends[task] : ends[task + 1]]


def _between(leaf: Any, begin: Any, end: Any) -> Any:
    """Return the rows of a tensor from `begin` to `end`."""
    tf = tensorflow()
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin:end]
    others = leaf.dense_shape[1:]
    return tf.sparse.slice(leaf, tf.concat([[begin], tf.zeros_like(others)], 0), tf.concat([[end - begin], others], 0))


def _size(leaf: Any) -> Any:
    tf = tensorflow()
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf, tf.int64)[0]


def _limits(size: Any, workers: int, task: int) -> tuple[Any, Any]:
    raw = tensorflow().raw_ops
    each, more = size // workers, size % workers
    begin, end = (
        block_begin(np.int64(at), each, more, lambda op, a, b: getattr(raw, op)(x=a, y=b)) for at in (task, task + 1)
    )
    return begin, end


def lengths(batch: Any, spec: Any) -> list[int]:
    """Return the lengths of a batch's dimensions that its spec leaves open, except for the rows; zeros for None."""
    leaves = _leaves(batch) if batch is not None else [None] * len(_leaves(spec))
    return [
        0 if leaf is None else int(leaf.shape[dim])
        for leaf, of in zip(leaves, _leaves(spec), strict=True)
        for dim in _open(of)
    ]


def none_of(spec: Any, sizes: Sequence[int], last: Any) -> Any:
    """Return an element without rows.

    Args:
        sizes: its `lengths`; other unknown dimensions get the length 0.
        last: the element before it, whose form it takes where the spec is too vague; None: there is none.
    """
    known = iter(sizes)
    before = _leaves(last) if last is not None else [None] * len(_leaves(spec))
    found = [_none(of, known, leaf) for of, leaf in zip(_leaves(spec), before, strict=True)]
    return tensorflow().nest.pack_sequence_as(spec, found)


def _leaves(nested: Any) -> list[Any]:
    leaves: list[Any] = tensorflow().nest.flatten(nested)
    return leaves


def _open(spec: Any) -> list[int]:
    """Return the dimensions that a spec leaves open, except for the rows."""
    if isinstance(spec, tensorflow().RaggedTensorSpec) or spec.shape.rank is None:
        return []
    return [dim for dim, size in enumerate(spec.shape.as_list()) if dim and size is None]


def _none(spec: Any, known: Iterator[int], last: Any) -> Any:
    tf = tensorflow()
    is_ragged = isinstance(spec, tf.RaggedTensorSpec)
    if last is not None and (is_ragged or spec.shape.rank is None):
        return _between(last, 0, 0)
    if is_ragged:
        inner = (
            spec.flat_values_spec.shape[1:] if spec.flat_values_spec is not None else spec.shape[spec.ragged_rank + 1 :]
        )
        values = tf.zeros([0, *_sizes(inner, iter(()))], spec.dtype)
        for _ in range(spec.ragged_rank):
            values = tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype))
        return values
    sizes = [0, *_sizes(spec.shape[1:], known)]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(np.zeros([0, len(sizes)], np.int64), tf.zeros([0], spec.dtype), sizes)
    return tf.zeros(sizes, spec.dtype)


def _sizes(shape: Any, known: Iterator[int]) -> list[int]:
    return [next(known, 0) if size is None else size for size in shape.as_list()]
