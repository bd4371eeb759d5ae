"""Blocks that look at each example by itself, and normalisations: [batch, features] to [batch, features]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.fuzz.net import D, Net

Block = Callable[[Net, Any], Any]
ACTIVATIONS = {
    "tanh": tf.tanh,
    "relu": tf.nn.relu,
    "gelu": tf.nn.gelu,
    "softplus": tf.nn.softplus,
    "elu": tf.nn.elu,
    "sigmoid": tf.sigmoid,
    "linear": tf.identity,
}


def width(value: Any) -> int:
    """Return the number of features."""
    return int(value.shape[-1])


def linear(net: Net, h: Any, units: int, *, bias: bool = True) -> Any:
    """Return h w + b, written in one of the usual ways."""
    w = net.variable("w", (width(h), units))
    written = net.dice.choice(["operator", "matmul", "einsum", "tensordot"])
    if written == "einsum" and h.shape.rank == 2:
        out = tf.einsum("bi,ij->bj", h, w)
    elif written == "tensordot" or h.shape.rank != 2:
        out = tf.tensordot(h, w, [[h.shape.rank - 1], [0]])
    else:
        out = tf.matmul(h, w)
    if not bias:
        return out
    b = net.variable("b", (units,), scale=0.1)
    return tf.nn.bias_add(out, b) if net.chance(0.4) else out + b


def dense(net: Net, h: Any) -> Any:
    act = ACTIVATIONS[net.dice.choice(list(ACTIVATIONS))]
    return act(linear(net, h, net.dice.choice([3, 4, 5])))


def residual(net: Net, h: Any) -> Any:
    return h + 0.5 * tf.tanh(linear(net, h, width(h)))


def gated(net: Net, h: Any) -> Any:
    a, b = tf.split(linear(net, h, 2 * width(h)), 2, axis=-1)
    return a * tf.sigmoid(b)


def layer_norm(net: Net, h: Any) -> Any:
    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    scale, offset = net.variable("scale", (width(h),), scale=0.1, mean=1.0), net.variable("offset", (width(h),))
    return (h - mean) * tf.math.rsqrt(variance + 1e-3) * scale + offset


def batch_norm(net: Net, h: Any) -> Any:
    """Batch normalisation that is written out, with moving averages."""
    h = linear(net, h, width(h), bias=False)
    mean, variance = tf.nn.moments(h, [0])
    scale, offset = net.variable("gamma", (width(h),), scale=0.1, mean=1.0), net.variable("beta", (width(h),))
    averages = [net.stored("moving_mean", [0.0] * width(h)), net.stored("moving_variance", [1.0] * width(h))]
    for average, value in zip(averages, (mean, variance), strict=True):
        net.update(average, 0.9 * average + 0.1 * value)
    if net.chance(0.5):
        return tf.nn.batch_normalization(h, mean, variance, offset, scale, 1e-3)
    return (h - mean) / tf.sqrt(variance + 1e-3) * scale + offset


def fused_batch_norm(net: Net, h: Any) -> Any:
    """TensorFlow's one op for it, which knows no float64."""
    net.loose = True
    channels = width(h)
    scale = tf.cast(net.variable("gamma", (channels,), scale=0.1, mean=1.0), tf.float32)
    offset = tf.cast(net.variable("beta", (channels,)), tf.float32)
    image = tf.cast(h, tf.float32)[:, None, None, :]
    y, mean, variance = tf.compat.v1.nn.fused_batch_norm(image, scale, offset, epsilon=1e-2)
    averages = [net.stored("moving_mean", [0.0] * channels), net.stored("moving_variance", [1.0] * channels)]
    for average, value in zip(averages, (mean, variance), strict=True):
        net.update(average, 0.9 * average + 0.1 * tf.cast(value, D))
    return tf.cast(y[:, 0, 0, :], D)


def dropout(net: Net, h: Any) -> Any:
    rate = net.dice.choice([0.2, 0.5])
    if net.chance(0.5):
        net.draws = True
        return tf.nn.dropout(h, rate, seed=net.dice.randint(1, 99))
    seed = [net.dice.randint(1, 99), 3]
    return tf.nn.experimental.stateless_dropout(h, rate, seed)


def noise(net: Net, h: Any) -> Any:
    """Noise from a stateless generator whose seed is a counter of steps."""
    count = net.stored("noise_step", 0)
    seed = tf.stack([tf.cast(count, tf.int32), net.dice.randint(1, 99)])
    drawn = tf.random.stateless_normal(tf.shape(h), seed, dtype=D)
    net.update_behind(count, count + 1)
    return h + 0.1 * drawn


def convolution(net: Net, h: Any) -> Any:
    """An image of its own, convolved, pooled, and joined."""
    channels = net.dice.choice([1, 2])
    image = net.input("image", 6, 5, channels)
    kernel = net.variable("kernel", (3, 3, channels, 3))
    stride, padding = net.dice.choice([1, 2]), net.dice.choice(["SAME", "VALID"])
    out = tf.nn.relu(tf.nn.conv2d(image, kernel, stride, padding) + net.variable("b", (3,), scale=0.1))
    if net.chance(0.5):
        pool = tf.nn.max_pool2d if net.chance(0.5) else tf.nn.avg_pool2d
        out = pool(out, 2, 2, "SAME")
    flat = tf.reshape(out, [-1, int(out.shape[1] * out.shape[2] * out.shape[3])])
    return tf.concat([h, tf.tanh(linear(net, flat, 3))], -1)


def small_convolution(net: Net, h: Any) -> Any:
    """Features taken for a line of pixels."""
    line = tf.expand_dims(h, -1)
    out = tf.nn.conv1d(line, net.variable("kernel", (2, 1, 2)), 1, "SAME")
    return tf.reduce_mean(tf.tanh(out), -1) + h


def reshaped(net: Net, h: Any) -> Any:
    """Through other shapes and back."""
    rows = tf.shape(h)[0] if net.style.batch is None or net.chance(0.3) else net.style.batch
    wide = linear(net, h, 6)
    way = net.dice.choice(["heads", "flat", "transposed", "expanded"])
    if way == "heads":
        heads = tf.transpose(tf.reshape(wide, [rows, 3, 2]), [0, 2, 1])
        return tf.reshape(tf.nn.softmax(heads), [rows, 6])
    if way == "flat":
        return tf.reshape(tf.tanh(tf.reshape(wide, [-1])), [rows, 6])
    if way == "transposed":
        return tf.transpose(tf.tanh(tf.transpose(wide) + net.variable("b", (6, 1))))
    return tf.squeeze(tf.tile(tf.expand_dims(wide, 1), [1, 1, 1]), [1])


def checked(net: Net, h: Any) -> Any:
    """Assertions and shapes that the program insists on."""
    h = tf.ensure_shape(h, [net.style.batch, width(h)])
    with tf.control_dependencies([tf.debugging.assert_all_finite(h, "not finite")]):
        h = tf.identity(h)
    if net.chance(0.3):
        with tf.control_dependencies([tf.compat.v1.assert_less(tf.reduce_max(tf.abs(h)), tf.constant(1e9, D))]):
            h = tf.identity(h)
    return tf.clip_by_value(h, -5.0, 5.0)


def custom_gradient(net: Net, h: Any) -> Any:
    """A layer whose gradient the program writes itself."""
    factor = net.dice.choice([0.5, -1.0])

    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        return tf.identity(x), lambda dy: factor * dy

    return scaled(residual(net, h))


def features(net: Net, h: Any) -> Any:
    """Ops along the features: sorting, the largest, sums so far."""
    way = net.dice.choice(["sort", "top", "cumsum", "softmax", "normalised", "where"])
    if way == "sort":
        return tf.sort(h, axis=-1)
    if way == "top":
        return tf.nn.top_k(h, min(3, width(h)))[0]
    if way == "cumsum":
        return tf.cumsum(h, -1, exclusive=net.chance(0.5), reverse=net.chance(0.5))
    if way == "softmax":
        return tf.nn.log_softmax(h)
    if way == "normalised":
        return h / (tf.norm(h + 0.1, axis=-1, keepdims=True) + 0.1)
    return tf.where(h > 0, h, 0.1 * tf.ones_like(h))


LAYERS: dict[str, tuple[float, Block]] = {
    "dense": (6, dense),
    "residual": (2, residual),
    "gated": (1, gated),
    "layer_norm": (2, layer_norm),
    "batch_norm": (2.5, batch_norm),
    "fused_batch_norm": (0.5, fused_batch_norm),
    "dropout": (2, dropout),
    "noise": (0.7, noise),
    "convolution": (1.5, convolution),
    "small_convolution": (0.7, small_convolution),
    "reshaped": (1.5, reshaped),
    "checked": (1, checked),
    "custom_gradient": (0.7, custom_gradient),
    "features": (1.5, features),
}
"""How often a block is drawn, and the block."""
