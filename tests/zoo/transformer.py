"""A post-norm transformer encoder with seeded dropout; two layers for tests, BERT-base on request.

The key projection has no bias: softmax is invariant to it, so its gradient is zero in theory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, integers
from .training import Forward, Variables, training_graph

v1 = tf.compat.v1


@dataclass(frozen=True)
class Shape:
    """The usual transformer hyper-parameters."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    sequence: int
    classes: int


_SHAPES = {
    "tiny": Shape(layers=2, hidden=8, heads=2, inner=12, vocabulary=11, sequence=3, classes=3),
    "small": Shape(layers=2, hidden=128, heads=4, inner=512, vocabulary=2000, sequence=32, classes=2),
    "large": Shape(layers=12, hidden=768, heads=12, inner=3072, vocabulary=30522, sequence=32, classes=2),
}


def _layer_norm(variables: Variables, x: Any, name: str) -> Any:
    with v1.variable_scope(name):
        gain = variables("gain", (x.shape[-1],), scale=0.1, offset=1.0)
        bias = variables("bias", (x.shape[-1],), scale=0.1)
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, bias, gain, 1e-6)


def _attention(variables: Variables, x: Any, shape: Shape, seed: int) -> Any:
    """Multi-head self-attention with dropout on the attention weights."""
    width = shape.hidden // shape.heads

    def heads(name: str) -> Any:
        projected = variables.dense(x, name, shape.hidden, bias=name != "key")
        return tf.transpose(tf.reshape(projected, [-1, shape.sequence, shape.heads, width]), [0, 2, 1, 3])

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = tf.matmul(query, key, transpose_b=True)
    weights = tf.nn.softmax(scores / np.sqrt(width).astype(x.dtype.as_numpy_dtype))
    mixed = tf.matmul(tf.nn.dropout(weights, 0.1, seed=seed), value)
    joined = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, shape.sequence, shape.hidden])
    return variables.dense(joined, "output", shape.hidden)


def build(options: Options) -> Built:
    """Classify token sequences by their first position."""
    shape = _SHAPES[options.size]
    scale = 0.3 if options.size == "tiny" else 0.02

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        words = variables("words", (shape.vocabulary, shape.hidden), scale=scale)
        positions = variables("positions", (shape.sequence, shape.hidden), scale=scale)
        x = _layer_norm(variables, tf.nn.embedding_lookup(words, inputs["ids"]) + positions, "norm")
        x = tf.nn.dropout(x, 0.1, seed=options.seed)
        for i in range(shape.layers):
            with v1.variable_scope(f"layer_{i}"):
                attended = _attention(variables, x, shape, options.seed + 1 + i)
                x = _layer_norm(variables, x + attended, "norm_1")
                inner = tf.nn.gelu(variables.dense(x, "inner", shape.inner))
                x = _layer_norm(variables, x + variables.dense(inner, "outer", shape.hidden), "norm_2")
        logits = variables.dense(x[:, 0], "logits", shape.classes)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["y"], logits=logits)
        clip_norm = 1.0 if options.size == "tiny" else None
        return Forward(losses=losses, outputs={"logits_out": logits}, clip_norm=clip_norm)

    inputs = (
        Input("ids", "int32", (shape.sequence,), integers(shape.vocabulary)),
        Input("y", "int32", (), integers(shape.classes)),
    )
    return training_graph(options, inputs, forward)


CASES = (Case(name="transformer", kind="graph", family="attention", builder=build),)
