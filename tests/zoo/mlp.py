"""A multi-layer perceptron with an L2 penalty: the smallest graph with a term that must be counted once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, integers
from .training import Forward, Variables, training_graph

_WIDTHS = {"tiny": (4, 6, 5, 3), "large": (784, 1024, 1024, 1024, 10)}


def build(options: Options) -> Built:
    """Classify vectors; labels are class numbers."""
    features, *hidden, classes = _WIDTHS[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        x = inputs["x"]
        for i, width in enumerate(hidden):
            x = tf.nn.relu(variables.dense(x, f"hidden_{i}", width))
        logits = variables.dense(x, "logits", classes)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["y"], logits=logits)
        penalty = 1e-2 * tf.add_n([tf.nn.l2_loss(w) for w in tf.compat.v1.trainable_variables()])
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), inputs["y"]), options.dtype))
        outputs = {"predictions": tf.nn.softmax(logits), "accuracy": accuracy}
        return Forward(losses=losses, penalty=penalty, outputs=outputs)

    return training_graph(
        options, (Input("x", "float", (features,)), Input("y", "int64", (), integers(classes))), forward
    )


CASES = (Case(name="mlp", kind="graph", family="dense", builder=build),)
