"""Blocks whose examples have lengths of their own: padded sequences that do not see their padding, and ragged rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.fuzz.layers import Block, linear, width
from tests.fuzz.net import D, Net

ROWS = 7  # of an embedding table


def padded(net: Net, h: Any) -> Any:
    """A layer over padded sequences whose padding counts for nothing, so each worker may have a length of its own."""
    lengths = net.input("own_lengths", dtype=tf.int32, kind="lengths")
    name = f"own_lengths{net.counts['own_lengths']}"
    steps = net.input("padded", "T", 3, trimmed_by=name)
    mask = tf.sequence_mask(lengths, tf.shape(steps)[1], dtype=D)[:, :, None]
    way = net.dice.choice(["mean", "sum", "largest", "attended", "flat"])
    if way == "attended":
        scores = linear(net, steps, 1, bias=False) + (mask - 1.0) * 1e3
        return tf.concat([h, tf.reduce_sum(tf.nn.softmax(scores, 1) * steps, 1)], -1)
    if way == "flat":  # all frames of the batch are the rows of one layer
        inner = tf.reshape(tf.tanh(linear(net, tf.reshape(steps, [-1, 3]), 3)), tf.shape(steps))
    else:
        inner = tf.tanh(linear(net, steps, 3))
    if way == "largest":
        return tf.concat([h, tf.reduce_max(inner + (mask - 1.0) * 9.0, 1)], -1)
    total = tf.reduce_sum(inner * mask, 1)
    if way == "mean":
        total /= tf.reduce_sum(mask, 1)
    return tf.concat([h, tf.ensure_shape(total, [net.style.batch, 3])], -1)


def ragged(net: Net, h: Any) -> Any:
    """Bags of words: a ragged argument of a function; in a graph its rows are cut out of a padded input."""
    table = net.variable("words", (ROWS, width(h)))
    if net.style.function:
        bags = net.input("bags", "T", dtype=tf.int64, kind="ragged", below=ROWS)
    else:
        lengths = net.input("bag_lengths", dtype=tf.int32, kind="lengths")
        bags = tf.RaggedTensor.from_tensor(net.ids("bag", ROWS, "T"), lengths)
    way = net.dice.choice(["mean", "sum", "padded", "segments", "mapped"])
    if way == "segments":
        rows = tf.gather(table, bags.flat_values)
        return h + 0.2 * tf.math.unsorted_segment_sum(rows, bags.value_rowids(), tf.shape(h)[0])
    found = bags.with_flat_values(tf.gather(table, bags.flat_values))
    if way == "padded":
        return h + tf.reduce_sum(tf.tanh(found.to_tensor()), 1)
    if way == "mapped":
        found = tf.ragged.map_flat_values(tf.tanh, found)
    total = tf.reduce_sum(found, 1)
    if way == "mean":
        total /= tf.cast(tf.maximum(bags.row_lengths(), 1), D)[:, None]
    return h + tf.ensure_shape(total, h.shape)


LENGTHS: dict[str, tuple[float, Block]] = {"padded": (2.5, padded), "ragged": (1.5, ragged)}
"""How often a block is drawn, and the block."""
