"""A masked loss: sum over the mask divided by its count, a quotient of two reductions over the batch.

Averaging per-replica quotients would be wrong here, and by how much depends on how the mask falls.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, integers, mask
from .training import Forward, Variables, training_graph

_SHAPES = {"tiny": (3, 4, 5, 3), "large": (32, 128, 256, 100)}  # sequence, features, units, classes


def build(options: Options) -> Built:
    """Tag the unmasked positions of padded sequences."""
    sequence, features, units, classes = _SHAPES[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        hidden = tf.nn.elu(variables.dense(inputs["x"], "hidden", units))
        logits = variables.dense(hidden, "logits", classes)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["tags"], logits=logits)
        weights = tf.cast(inputs["mask"], options.dtype)
        total, count = tf.reduce_sum(losses * weights), tf.reduce_sum(weights)
        loss = tf.math.divide_no_nan(total, count) if options.reduction == "mean" else total
        return Forward(loss=loss, outputs={"count": count, "tagged": tf.argmax(logits, -1)})

    inputs = (
        Input("x", "float", (sequence, features)),
        Input("tags", "int32", (sequence,), integers(classes)),
        Input("mask", "bool", (sequence,), mask(0.4)),
    )
    return training_graph(options, inputs, forward)


CASES = (Case(name="masked", kind="graph", family="dense", builder=build),)
