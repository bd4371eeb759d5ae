"""An embedding language model: repeated ids, a table tied to the softmax, and a table that is only looked up.

The tied table's gradient is dense (a matmul's and a gather's, added); the other one stays sparse, with
repeated rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, integers
from .training import Forward, Variables, training_graph


@dataclass(frozen=True)
class Shape:
    """Table sizes and sequence length."""

    vocabulary: int
    topics: int
    width: int
    sequence: int


_SHAPES = {"tiny": Shape(9, 5, 6, 4), "large": Shape(20000, 5000, 256, 20)}


def build(options: Options) -> Built:
    """Predict each next token from the current one and from a bag of topics."""
    shape = _SHAPES[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        words = variables("words", (shape.vocabulary, shape.width))
        topics = variables("topics", (shape.topics, shape.width))
        bag = tf.reduce_sum(tf.nn.embedding_lookup(topics, inputs["topic"]), axis=1, keepdims=True)
        x = tf.nn.embedding_lookup(words, inputs["ids"]) + bag
        hidden = tf.tanh(variables.dense(x, "hidden", shape.width))
        flat = tf.reshape(hidden, [-1, shape.width])
        logits = tf.matmul(flat, words, transpose_b=True) + variables("bias", (shape.vocabulary,), scale=0.1)
        targets = tf.reshape(inputs["targets"], [-1])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
        return Forward(losses=losses, outputs={"per_token": tf.reshape(losses, [-1, shape.sequence])})

    inputs = (
        Input("ids", "int32", (shape.sequence,), integers(shape.vocabulary)),
        Input("topic", "int64", (3,), integers(shape.topics)),
        Input("targets", "int32", (shape.sequence,), integers(shape.vocabulary)),
    )
    return training_graph(options, inputs, forward)


CASES = (Case(name="language_model", kind="graph", family="sparse", builder=build),)
