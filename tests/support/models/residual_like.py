"""Residual networks as TensorFlow 1 wrote them, small: moving averages are updated by control dependencies."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

v1 = tf.compat.v1
TYPE = tf.float64


def _conv(x: Any, channels: int, name: str, stride: int = 1) -> Any:
    kernel = v1.get_variable(
        f"{name}/kernel", [3, 3, x.shape[-1], channels], x.dtype, v1.truncated_normal_initializer(stddev=0.2)
    )
    return tf.nn.conv2d(x, kernel, stride, "SAME")


def _batch_norm(x: Any, name: str, *, fused: bool) -> Any:
    """As tf.layers.batch_normalization in training: moving averages are updated by ops of a collection."""
    with v1.variable_scope(name):
        size, kind = [x.shape[-1]], x.dtype.base_dtype
        gamma = v1.get_variable("gamma", size, kind, v1.ones_initializer())
        beta = v1.get_variable("beta", size, kind, v1.zeros_initializer())
        mean_ = v1.get_variable("moving_mean", size, kind, v1.zeros_initializer(), trainable=False)
        var_ = v1.get_variable("moving_variance", size, kind, v1.ones_initializer(), trainable=False)
        if fused:
            y, mean, variance = v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3, is_training=True)
        else:
            mean, variance = tf.nn.moments(x, list(range(len(x.shape) - 1)))
            y = tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)
        for variable, value in ((mean_, mean), (var_, variance)):
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_sub(variable, (variable - value) * 0.1))
        return y


def resnet(
    *, blocks: int = 4, fused: bool = False, dtype: Any = TYPE, rate: float = 0.05
) -> tuple[Any, list[str], Any]:
    """Build a residual network; return the loss, what boundaries may lie behind, and the update."""
    with v1.variable_scope("resnet", use_resource=True):
        x = v1.placeholder(dtype, [None, 6, 6, 3], name="images")
        labels = v1.placeholder(tf.int32, [None], name="labels")
        h, cuts = _conv(x, 4, "stem"), []
        for i in range(blocks):
            shortcut = h
            h = tf.nn.relu(_batch_norm(_conv(h, 4, f"block_{i}/a"), f"block_{i}/bn_a", fused=fused))
            h = _batch_norm(_conv(h, 4, f"block_{i}/b"), f"block_{i}/bn_b", fused=fused)
            h = tf.nn.relu(h + shortcut)
            cuts.append(h.op.name)
        h = tf.reduce_mean(h, [1, 2])
        kernel = v1.get_variable("dense/kernel", [4, 5], dtype, v1.truncated_normal_initializer(stddev=0.2))
        logits = tf.matmul(h, kernel)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        loss += 1e-4 * tf.add_n([tf.nn.l2_loss(v) for v in v1.trainable_variables() if "bn" not in v.name])
        loss = tf.identity(loss, name="loss")
        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.MomentumOptimizer(rate, 0.9)
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            return loss, cuts[:-1], optimizer.minimize(loss, step)
