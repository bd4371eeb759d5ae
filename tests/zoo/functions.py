"""Plain training functions over `tf.Variable`s with Keras 3 optimizers: a dense one and a sparse one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .case import BuiltFunction, Case, Options
from .data import Input, integers
from .optimizers import KERAS_OPTIMIZERS
from .stepping import apply, finish, variable
from .training import reduced

_DENSE = {"tiny": (4, 6, 3), "large": (784, 2048, 10)}  # features, hidden, classes
_SPARSE = {"tiny": (9, 5, 4, 3), "large": (50000, 128, 20, 10)}  # vocabulary, width, sequence, classes


def build_dense(options: Options) -> BuiltFunction:
    """Build an MLP with stateless dropout, whose seed is a counter variable."""
    features, units, classes = _DENSE[options.size]
    w1, b1 = variable(options, "w1", (features, units)), variable(options, "b1", (units,), 0.1)
    w2, b2 = variable(options, "w2", (units, classes)), variable(options, "b2", (classes,), 0.1)
    count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
    weights = [w1, b1, w2, b2]
    optimizer = KERAS_OPTIMIZERS[options.optimizer]()

    def step(x: Any, y: Any) -> dict[str, Any]:
        seed = tf.stack([tf.constant(options.seed, tf.int64), count.assign_add(1)])
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.matmul(x, w1) + b1)
            keep = tf.random.stateless_uniform(tf.shape(hidden), seed, dtype=hidden.dtype) >= 0.25
            hidden = tf.where(keep, hidden / 0.75, tf.zeros_like(hidden))
            logits = tf.matmul(hidden, w2) + b2
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = reduced(losses, options.reduction)
        apply(optimizer, tape.gradient(loss, weights), weights)
        return {"loss": loss, "predictions": tf.argmax(logits, 1)}

    inputs = (Input("x", "float", (features,)), Input("y", "int32", (), integers(classes)))
    return finish(options, inputs, step, weights, optimizer, [count])


def build_sparse(options: Options) -> BuiltFunction:
    """Build a bag-of-words classifier; its table's gradient is IndexedSlices with repeated rows."""
    vocabulary, width, sequence, classes = _SPARSE[options.size]
    table = variable(options, "table", (vocabulary, width))
    kernel, bias = variable(options, "kernel", (width, classes)), variable(options, "bias", (classes,), 0.1)
    weights = [table, kernel, bias]
    optimizer = KERAS_OPTIMIZERS[options.optimizer]()

    def step(ids: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            bag = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
            logits = tf.matmul(tf.tanh(bag), kernel) + bias
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = reduced(losses, options.reduction)
        apply(optimizer, tape.gradient(loss, weights), weights)
        return {"loss": loss, "losses": losses}

    inputs = (
        Input("ids", "int32", (sequence,), integers(vocabulary)),
        Input("y", "int32", (), integers(classes)),
    )
    return finish(options, inputs, step, weights, optimizer)


CASES = (
    Case(name="function_dense", kind="function", family="dense", builder=build_dense),
    Case(name="function_sparse", kind="function", family="sparse", builder=build_sparse),
)
