"""Deep models whose activations can be computed again, and what TensorFlow runs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite import GraphItem
from autograph_rewrite.runtime.engine.session import open_session
from tests.support.training import placeholder, v1, variable

Forward = Callable[[], Mapping[str, Any]]


def _weights(name: str, *shape: int) -> Any:
    seed = sum(map(ord, name))
    return variable(name, np.random.default_rng(seed).normal(size=shape) * 0.5)


def chain(layers: int = 16, width: int = 4) -> Forward:
    """Return layers of a product and a hyperbolic tangent."""

    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, width), placeholder("y", None, width)
        h = x
        for i in range(layers):
            with tf.name_scope(f"layer_{i}"):
                h = tf.tanh(h @ _weights(f"w{i}", width, width), name="act")
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    return forward


def transformer(blocks: int = 3, dropout: str = "") -> Forward:
    """Return blocks of attention and dense layers; `dropout` is stateful, stateless or none."""
    width, heads, time = 8, 2, 5

    def norm(h: Any) -> Any:
        mean = tf.reduce_mean(h, -1, keepdims=True)
        return (h - mean) * tf.math.rsqrt(tf.reduce_mean((h - mean) ** 2, -1, keepdims=True) + 1e-3)

    def dropped(a: Any, seed: int) -> Any:
        if dropout == "stateful":
            return tf.nn.dropout(a, 0.2, seed=seed)
        return tf.nn.experimental.stateless_dropout(a, 0.2, seed=[3, seed]) if dropout else a

    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, time, width), placeholder("y", None, time, width)
        h = x
        for i in range(blocks):
            with tf.name_scope(f"block_{i}"):
                qkv = _weights(f"qkv{i}", width, 3, heads, width // heads)
                q, k, v = tf.unstack(tf.einsum("btd,dchk->cbhtk", norm(h), qkv))
                a = dropped(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), i)
                mixed = tf.reshape(tf.transpose(tf.matmul(a, v), [0, 2, 1, 3]), [-1, time, width])
                h = h + mixed @ _weights(f"out{i}", width, width)
                h = h + tf.nn.gelu(norm(h) @ _weights(f"up{i}", width, 16)) @ _weights(f"down{i}", 16, width)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    return forward


def residual() -> Mapping[str, Any]:
    """Return residual convolutions whose statistics are those of the whole batch."""
    x, y = placeholder("x", None, 5, 5, 3), placeholder("y", None, 3)
    h = x
    for i in range(4):
        with tf.name_scope(f"unit_{i}"):
            z = tf.nn.conv2d(h, _weights(f"k{i}", 3, 3, 3, 3), 1, "SAME")
            mean, variance = tf.nn.moments(z, [0, 1, 2])
            h = h + tf.nn.relu(tf.nn.batch_normalization(z, mean, variance, None, _weights(f"g{i}", 3), 1e-3))
    return {"loss": tf.reduce_mean((tf.reduce_mean(h, [1, 2]) - y) ** 2)}


def two_losses() -> Mapping[str, Any]:
    """Return a loss that adds up one in the middle and one at the end."""
    x, y = placeholder("x", None, 4), placeholder("y", None, 4)
    h, losses = x, []
    for i in range(8):
        h = tf.tanh(h @ _weights(f"w{i}", 4, 4))
        if i in (3, 7):
            losses.append(tf.reduce_mean((h - y) ** 2))
    return {"loss": losses[0] + losses[1], "early": losses[0]}


def second_order() -> Mapping[str, Any]:
    """Return a loss with a penalty on the gradient that another loss sends to the input."""
    x, y = placeholder("x", None, 4), placeholder("y", None, 4)
    h = x
    for i in range(6):
        h = tf.tanh(h @ _weights(f"w{i}", 4, 4))
    loss = tf.reduce_mean((h - y) ** 2)
    slope = v1.gradients(loss, x)[0]
    return {"loss": loss + 0.1 * tf.reduce_sum(slope**2)}


def feeds(shape: tuple[int, ...], labels: tuple[int, ...], sizes: tuple[int, ...] = (6, 5)) -> list[dict[str, Any]]:
    """Return a few batches."""
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(n, *shape)), "y": rng.normal(size=(n, *labels))} for n in sizes]


def executed(item: GraphItem, feed: Mapping[str, Any]) -> Counter[str]:
    """Return how many nodes of each op TensorFlow has in one training step, behind its own optimizers."""
    metadata = v1.RunMetadata()
    with open_session(item, config=v1.ConfigProto()) as session:
        session.run(item.init_op)
        given = {f"{name}:0": value for name, value in feed.items()}
        options = v1.RunOptions(output_partition_graphs=True)
        session.tf_session.run(["out_loss:0", "train"], given, options=options, run_metadata=metadata)
    return Counter(node.op for graph in metadata.partition_graphs for node in graph.node)
