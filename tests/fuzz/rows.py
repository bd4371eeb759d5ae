"""Blocks in which examples meet: views joined along the batch, statistics of it, lookups, masks, routing."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.fuzz.layers import Block, linear, residual, width
from tests.fuzz.net import D, Net

v1 = tf.compat.v1
ROWS = 7  # of an embedding table


def two_views(net: Net, h: Any) -> Any:
    """The same layer on two views that are joined along the batch, then split again."""
    other = tf.reverse(h, [1]) if net.chance(0.5) else h + 0.1
    joined = tf.tanh(linear(net, tf.concat([h, other], 0), width(h)))
    if net.chance(0.5):
        a, b = tf.split(joined, 2, 0)
    else:
        a, b = joined[: tf.shape(h)[0]], joined[tf.shape(h)[0] :]
    return a - 0.5 * b if net.chance(0.5) else tf.concat([a, b], -1)


def real_and_generated(net: Net, h: Any) -> Any:
    """A layer on fed rows and on computed rows, as a discriminator sees them."""
    real = net.input("real", width(h))
    joined = tf.nn.elu(linear(net, tf.concat([real, h], 0), 3))
    net.losses.append(0.1 * tf.reduce_mean(joined[:, 0]))
    return joined[tf.shape(real)[0] :]


def centred(net: Net, h: Any) -> Any:
    """What is done with statistics of the batch without being a batch normalisation."""
    way = net.dice.choice(["mean", "std", "max", "norm", "rank", "softmax", "first", "last"])
    if way == "mean":
        return h - tf.reduce_mean(h, 0)
    if way == "std":
        return (h - tf.reduce_mean(h, 0)) / (tf.math.reduce_std(h, 0) + 0.5)
    if way == "max":
        return h / (tf.reduce_max(tf.abs(h), 0) + 0.5)
    if way == "norm":
        return h * tf.math.rsqrt(tf.reduce_sum(h**2) + 0.5)
    if way == "rank":
        return h - tf.cast(tf.range(tf.shape(h)[0]), D)[:, None] * 0.1
    if way == "softmax":
        return h * tf.nn.softmax(h, axis=0)
    return h - h[:1] if way == "first" else h * tf.sigmoid(h[-1])


def reordered(net: Net, h: Any) -> Any:
    """Rows in another order, or along which something runs."""
    way = net.dice.choice(["reverse", "roll", "sorted", "cumsum", "backwards", "neighbours", "gathered"])
    if way == "reverse":
        return h + 0.3 * tf.reverse(h, [0])
    if way == "roll":
        return h - 0.3 * tf.roll(h, 1, 0)
    if way == "sorted":
        return tf.gather(h, tf.argsort(h[:, 0]))
    if way == "cumsum":
        return tf.cumsum(h, 0) * 0.2
    if way == "backwards":
        return h[::-1]
    if way == "neighbours":
        return h + 0.2 * tf.pad(h[1:], [[0, 1], [0, 0]])
    return h + tf.gather(h, tf.range(tf.shape(h)[0]) // 2)


def embedding(net: Net, h: Any) -> Any:
    """A table that is looked up, in one of the usual ways."""
    table = net.variable("table", (ROWS, width(h)))
    way = net.dice.choice(["gather", "lookup", "bag", "one_hot", "sparse", "twice"])
    if way == "gather":
        return h + tf.gather(table, net.ids("ids", ROWS))
    if way == "lookup":
        return h * tf.nn.embedding_lookup(table, net.ids("ids", ROWS))
    if way == "one_hot":
        return h + tf.one_hot(net.ids("ids", ROWS), ROWS, dtype=D) @ table
    if way == "twice":
        ids = net.ids("ids", ROWS, 2)
        return h + tf.gather(table, ids[:, 0]) - tf.gather(table, ids[:, 1])
    ids = net.ids("ids", ROWS, 4)
    if way == "bag":
        return h + tf.reduce_mean(tf.gather(table, ids), 1)
    entries = tf.sparse.from_dense(ids + tf.reverse(ids, [1]))
    combiner = net.dice.choice(["sum", "mean", "sqrtn"])
    wide = net.variable("wide_table", (2 * ROWS, width(h)))
    return h + tf.ensure_shape(tf.nn.embedding_lookup_sparse(wide, entries, None, combiner=combiner), h.shape)


def partitioned_table(net: Net, h: Any) -> Any:
    """A table that the program itself has partitioned."""
    if net.style.function:
        return embedding(net, h)
    values = net.numbers.normal(size=(ROWS + 4, width(h))) * 0.4
    name = net.name("shards")
    pieces = v1.get_variable(
        name,
        shape=values.shape,
        initializer=lambda shape, dtype=D, partition_info=None: values[: shape[0]],
        dtype=D,
        partitioner=v1.fixed_size_partitioner(net.dice.choice([2, 3])),
        use_resource=not net.style.reference,
    )
    net.trained.extend(pieces)
    strategy = net.dice.choice(["div", "mod"])
    return h + v1.nn.embedding_lookup(list(pieces), net.ids("ids", ROWS + 4), partition_strategy=strategy)


def masked_rows(net: Net, h: Any) -> Any:
    """Rows that a mask keeps: their layer's output goes back, or only into the loss."""
    mask = net.input("keep", dtype=net.dice.choice([tf.bool, D]), kind="mask")
    chosen = tf.cast(mask, tf.bool)
    way = net.dice.choice(["where", "multiplied", "boolean_mask", "scattered"])
    if way == "where":
        return tf.where(chosen[:, None], residual(net, h), h)
    if way == "multiplied":
        return h * (0.5 + tf.cast(mask, D)[:, None])
    if way == "boolean_mask":
        kept = tf.boolean_mask(h, chosen)
        net.losses.append(0.1 * tf.reduce_mean(tf.tanh(linear(net, kept, 2))))
        return h
    at = tf.where(chosen)
    return h + tf.scatter_nd(at, tf.tanh(tf.gather_nd(h, at)), tf.shape(h, out_type=tf.int64))


def experts(net: Net, h: Any) -> Any:
    """Each row goes through one of two layers."""
    route = tf.cast(h[:, 0] > 0, tf.int32)
    parts = tf.dynamic_partition(h, route, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(h)[0]), route, 2)
    done = [tf.tanh(linear(net, part, width(h))) for part in parts]
    return tf.ensure_shape(tf.dynamic_stitch(places, done), h.shape)


def groups(net: Net, h: Any) -> Any:
    """Sums or means of groups of rows, looked up again."""
    ids = tf.cast(net.ids("group", 3), tf.int32)
    way = net.dice.choice([tf.math.unsorted_segment_sum, tf.math.unsorted_segment_mean, tf.math.unsorted_segment_max])
    return h + 0.2 * tf.gather(tf.clip_by_value(way(h, ids, 3), -9.0, 9.0), ids)


def similarity(net: Net, h: Any) -> Any:
    """Every row attends to all rows."""
    scores = tf.matmul(h, h, transpose_b=True) * 0.3
    return h + tf.matmul(tf.nn.softmax(scores), h)


def standardised_input(net: Net, h: Any) -> Any:
    """A fed value, normalised over the batch, weighs the rows: advantages."""
    fed = net.input("advantage")
    mean, variance = tf.nn.moments(fed, [0])
    return h * ((fed - mean) / tf.sqrt(variance + 0.1))[:, None]


def wide_columns(net: Net, h: Any) -> Any:
    """A fed vector or matrix that all replicas share."""
    shared = net.input("shared", width(h), axis=None)
    return h * shared if net.chance(0.5) else h + tf.reduce_sum(shared) * 0.1


MIXING: dict[str, tuple[float, Block]] = {
    "two_views": (1.5, two_views),
    "real_and_generated": (0.8, real_and_generated),
    "centred": (2, centred),
    "reordered": (1.5, reordered),
    "embedding": (3, embedding),
    "partitioned_table": (0.7, partitioned_table),
    "masked_rows": (1.5, masked_rows),
    "experts": (0.7, experts),
    "groups": (1, groups),
    "similarity": (0.7, similarity),
    "standardised_input": (1, standardised_input),
    "wide_columns": (0.7, wide_columns),
}
"""How often a block is drawn, and the block."""
