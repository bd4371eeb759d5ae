"""tf-slim networks as v1 graphs, as its walk-through and models train."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.corpus.program import Built, Feed, Library, Program, graphed, ids, placeholders

v1 = tf.compat.v1
ADDRESS = "github.com/google-research/tf-slim"
F = "float32"


def _trained(graph: Any, optimizer: Any, **feeds: Feed) -> Built:
    """Minimise all losses with slim's train op, after the updates of batch norm."""
    import tf_slim as slim

    total = v1.losses.get_total_loss()
    train = slim.learning.create_train_op(total, optimizer)
    return graphed(graph, total, train, **feeds)


def slim_regression() -> Built:
    import tf_slim as slim

    feeds = {"x": Feed((3,), dtype=F), "y": Feed((1,), dtype=F)}
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        x, y = placeholders(**feeds)
        with slim.arg_scope([slim.fully_connected], weights_regularizer=slim.l2_regularizer(0.01)):
            net = slim.fully_connected(x, 8, scope="fc1")
            net = slim.dropout(net, 0.8, is_training=True)
            net = slim.fully_connected(net, 1, activation_fn=None, scope="prediction")
        v1.losses.mean_squared_error(y, net)
        return _trained(graph, v1.train.AdamOptimizer(0.005), **feeds)


def slim_cnn() -> Built:
    """Variables are slim's; what stands on the layers that TensorFlow 2.21 has no more is not."""
    import tf_slim as slim

    feeds = {"images": Feed((12, 12, 3), "unit", dtype=F), "labels": ids(5)}
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        x, labels = placeholders(**feeds)
        initial = v1.glorot_uniform_initializer(seed=1)
        kernel = slim.model_variable(
            "conv1/weights", [5, 5, 3, 8], initializer=initial, regularizer=slim.l2_regularizer(4e-5)
        )
        net = tf.nn.conv2d(x, kernel, strides=1, padding="SAME")
        net = tf.nn.relu(slim.layer_norm(net, scope="conv1/norm"))
        net = tf.nn.max_pool2d(net, 2, 2, "VALID")
        net = slim.fully_connected(tf.reshape(net, [-1, 6 * 6 * 8]), 8, scope="fc1")
        logits = slim.fully_connected(net, 5, activation_fn=None, scope="logits")
        v1.losses.sparse_softmax_cross_entropy(labels, logits)
        return _trained(graph, v1.train.MomentumOptimizer(0.01, 0.9), **feeds)


def slim_classifier() -> Built:
    import tf_slim as slim

    feeds = {"x": Feed((6,), dtype=F), "labels": ids(5)}
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        x, labels = placeholders(**feeds)
        with slim.arg_scope([slim.fully_connected], weights_regularizer=slim.l2_regularizer(4e-5)):
            net = slim.stack(x, slim.fully_connected, [8, 8], scope="fc")
            net = slim.layer_norm(net)
        logits = slim.fully_connected(slim.dropout(net, 0.8), 5, activation_fn=None)
        v1.losses.softmax_cross_entropy(tf.one_hot(labels, 5), logits, label_smoothing=0.1)
        return _trained(graph, v1.train.RMSPropOptimizer(0.01, 0.9, 0.9, 1.0), **feeds)


PROGRAMS = (
    Program(slim_regression, ADDRESS, floats=F),
    Program(slim_classifier, "github.com/tensorflow/models/tree/master/research/slim", floats=F),
    Program(slim_cnn, ADDRESS, floats=F),
)
LIBRARY = Library("tf_slim", PROGRAMS, needs=("tf_slim",))
