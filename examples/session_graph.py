"""A TensorFlow 1 graph: wrap it, rewrite it, and run it by its original names."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar

v1 = tf.compat.v1
CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
STEPS = int(os.environ.get("EXAMPLE_STEPS", "200"))


def build() -> tf.Graph:
    """Build logistic regression for one device, as any tutorial does."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        y = v1.placeholder(tf.float32, [None], name="y")
        w = v1.get_variable("w", initializer=tf.zeros([3, 1]))
        b = v1.get_variable("b", initializer=tf.zeros([1]))
        logits = tf.squeeze(tf.matmul(x, w) + b, axis=1)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits), name="loss")
        v1.train.AdagradOptimizer(0.5).minimize(loss, name="train")
        v1.global_variables_initializer()
    return graph


def main() -> None:
    item = ar.GraphItem.from_graph(build(), train_op="train", outputs=["loss"], init_op="init")
    new = ar.rewrite(item, CONFIG)
    print(new.report)
    rng = np.random.default_rng(0)
    with new.session() as session:
        session.run(new.init_op)
        for number in range(1, STEPS + 1):
            x = rng.normal(size=(29, 3))
            y = x @ [1.0, -2.0, 0.5] > 0.3
            loss, _ = session.run(["loss", "train"], feed_dict={"x:0": x, "y": y})
            if number == 1 or number % max(STEPS // 5, 1) == 0:
                print(f"step {number:4}  loss {loss:.5f}")
        print("w =", session.read_variable("w").ravel().round(2))
    print(ar.verify(item, CONFIG))


if __name__ == "__main__":
    main()
