"""Write the GraphDef of a two-layer regression with SGD, made by plain TensorFlow: the input of a smoke test.

It feeds `x` and `y` (any batch size), returns `loss`, trains with `train` and initialises with `init`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf


def small_graph() -> tf.Graph:
    """Build the training graph as a user of TensorFlow 1 would."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        y = v1.placeholder(tf.float32, [None, 1], name="y")
        w1 = v1.get_variable("w1", [4, 8], use_resource=True)
        b1 = v1.get_variable("b1", [8], initializer=v1.zeros_initializer(), use_resource=True)
        w2 = v1.get_variable("w2", [8, 1], use_resource=True)
        hidden = tf.nn.relu(tf.matmul(x, w1) + b1)
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, w2) - y), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        v1.variables_initializer(v1.global_variables(), name="init")
    return graph


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(small_graph().as_graph_def().SerializeToString())
