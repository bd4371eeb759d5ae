"""A small ResNet with batch normalisation, the composite kind and the fused kind.

Convolutions have no bias: before batch normalisation its gradient is zero in theory, and Adam would train
on noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, integers
from .training import Forward, Variables, training_graph

v1 = tf.compat.v1


@dataclass(frozen=True)
class Shape:
    """Image size, channels per stage and blocks per stage."""

    image: int
    stages: tuple[int, ...]
    blocks: int
    classes: int


_SHAPES = {"tiny": Shape(6, (3, 4), 1, 3), "large": Shape(32, (32, 64, 128), 2, 10)}


def _moving(variables: Variables, name: str, start: float, value: Any) -> None:
    """Keep an exponential moving average of `value`."""
    average = variables(name, value.shape, scale=0.0, offset=start, trainable=False)
    decay = tf.cast(0.9, value.dtype)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_sub(average, (1 - decay) * (average - value)))


def _batch_norm(variables: Variables, x: Any, name: str, fused: bool) -> Any:
    with v1.variable_scope(name):
        channels = (x.shape[-1],)
        gamma = variables("gamma", channels, scale=0.1, offset=1.0)
        beta = variables("beta", channels, scale=0.1)
        if fused:
            y, mean, variance = v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3, is_training=True)
        else:
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            y = tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)
        _moving(variables, "moving_mean", 0.0, mean)
        _moving(variables, "moving_variance", 1.0, variance)
        return y


def _convolution(variables: Variables, x: Any, name: str, channels: int, kernel: int, stride: int = 1) -> Any:
    with v1.variable_scope(name):
        return tf.nn.conv2d(x, variables("w", (kernel, kernel, x.shape[-1], channels)), stride, "SAME")


def _block(variables: Variables, x: Any, channels: int, stride: int, fused: bool) -> Any:
    """Two convolutions around an identity or a projection."""
    y = _convolution(variables, x, "conv1", channels, 3, stride)
    y = tf.nn.relu(_batch_norm(variables, y, "bn1", fused))
    y = _batch_norm(variables, _convolution(variables, y, "conv2", channels, 3), "bn2", fused)
    shortcut = x if stride == 1 else _convolution(variables, x, "projection", channels, 1, stride)
    return tf.nn.relu(y + shortcut)


def build(options: Options, fused: bool) -> Built:
    """Classify images."""
    shape = _SHAPES[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        x = _convolution(variables, inputs["image"], "stem", shape.stages[0], 3)
        x = tf.nn.max_pool2d(tf.nn.relu(_batch_norm(variables, x, "stem_bn", fused)), 3, 1, "SAME")
        for stage, channels in enumerate(shape.stages):
            for block in range(shape.blocks):
                with v1.variable_scope(f"stage{stage}_block{block}"):
                    x = _block(variables, x, channels, 2 if stage and not block else 1, fused)
        x = tf.reduce_mean(tf.nn.avg_pool2d(x, 2, 1, "VALID"), [1, 2])
        logits = variables.dense(x, "logits", shape.classes)
        labels = tf.one_hot(inputs["label"], shape.classes, dtype=options.dtype)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return Forward(losses=losses, outputs={"logits_out": logits})

    inputs = (
        Input("image", "float", (shape.image, shape.image, 3)),
        Input("label", "int32", (), integers(shape.classes)),
    )
    return training_graph(options, inputs, forward)


CASES = (
    Case(name="cnn", kind="graph", family="conv", builder=partial(build, fused=False)),
    Case(
        name="cnn_fused",
        kind="graph",
        family="conv",
        builder=partial(build, fused=True),
        dtypes=("float32",),  # FusedBatchNormV3 has no float64 kernel
    ),
)
