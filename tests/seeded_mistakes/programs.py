"""Steps whose result depends on the order of what they do: several updates of one variable, counters, late reads.

The zoo has real models; what they hardly have is state that is read and written more than once in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tests.zoo.case import Built, Options
from tests.zoo.data import Input
from tests.zoo.training import Step, Variables, assemble

v1 = tf.compat.v1
INPUTS = (Input("x", "float", (4,)), Input("y", "float", (2,)))


def ordered_updates(options: Options) -> Built:
    """Decay, then descend, then clip: three updates of one variable in an order, with reads between them."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        w, u = variables("w", (4, 6)), variables("u", (6, 2))
        average = variables("average", (4, 6), trainable=False)
        loss = tf.reduce_mean(tf.square(tf.tanh(inputs["x"] @ w) @ u - inputs["y"]))
        grads = tf.gradients(loss, [w, u])
        before = [w.read_value(), u.read_value()]
        with tf.control_dependencies([*grads, *before]):
            decay = [v1.assign_sub(w, 0.1 * before[0]), v1.assign(u, 0.8 * before[1])]
        with tf.control_dependencies(decay):
            descend = v1.train.MomentumOptimizer(0.3, 0.9).apply_gradients(zip(grads, [w, u], strict=True))
        with tf.control_dependencies([descend]):
            clipped = v1.assign(w, tf.clip_by_value(w.read_value(), -0.4, 0.4))
        with tf.control_dependencies([clipped]):
            after = v1.assign_sub(average, 0.25 * (average.read_value() - w.read_value()))
        return Step(loss, [after, descend, *decay], {"length": tf.norm(before[0])})

    return assemble(options, INPUTS, body)


def counted(options: Options) -> Built:
    """Totals over the examples, a counter that the rate follows, and a metric that is read behind its update."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        w, b = variables("w", (4, 2)), variables("b", (2,))
        step = v1.train.get_or_create_global_step()
        total = v1.get_variable("total", (), options.dtype, v1.zeros_initializer(), trainable=False, use_resource=True)
        seen = v1.get_variable("seen", (), options.dtype, v1.zeros_initializer(), trainable=False, use_resource=True)
        losses = tf.reduce_sum(tf.square(inputs["x"] @ w + b - inputs["y"]), 1)
        rate = 0.1 / (1 + tf.cast(step.read_value(), options.dtype))
        size = tf.cast(tf.size(losses), options.dtype)
        loss = tf.reduce_sum(losses) / size + 0.05 * tf.reduce_sum(tf.square(w))
        with tf.control_dependencies([v1.assign_add(total, tf.reduce_sum(losses)), v1.assign_add(seen, size)]):
            mean = total.read_value() / seen.read_value()
        grads = tf.gradients(loss, [w, b])
        with tf.control_dependencies([rate]):
            train = v1.train.GradientDescentOptimizer(rate).apply_gradients(zip(grads, [w, b], strict=True), step)
        with tf.control_dependencies([train]):
            behind = tf.identity(w.read_value()[0])
        return Step(loss, [train, mean.op, behind.op], {"mean": mean, "losses": losses, "behind": behind})

    return assemble(options, INPUTS, body)


def random_and_branch(options: Options) -> Built:
    """Dropout with a seed, and a branch that the batch decides."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        w, u = variables("w", (4, 6)), variables("u", (6, 2))
        hidden = tf.nn.dropout(tf.tanh(inputs["x"] @ w), 0.4, seed=3)
        error = hidden @ u - inputs["y"]
        far = tf.greater(tf.reduce_sum(tf.square(error)), 0.1)
        loss = tf.cond(far, lambda: tf.reduce_mean(tf.abs(error)), lambda: tf.reduce_mean(tf.square(error)))
        scale = tf.reduce_max(tf.abs(error), 0)
        grads = tf.gradients(loss, [w, u])
        train = v1.train.AdagradOptimizer(0.1).apply_gradients(zip(grads, [w, u], strict=True))
        noisy = v1.assign_add(
            variables("noise", (3,), trainable=False), tf.random.normal([3], seed=5, dtype=options.dtype)
        )
        return Step(loss, [train, noisy], {"scale": scale, "error": error})

    return assemble(options, INPUTS, body)


def contrastive(options: Options) -> Built:
    """Examples that are compared with each other, a running mean and a clipped norm: gathers in the forward pass."""

    def body(variables: Variables, inputs: dict[str, Any]) -> Step:
        w, c = variables("w", (4, 6)), variables("c", (2, 6))
        mean = variables("mean", (6,), trainable=False)
        left, right = inputs["x"] @ w, inputs["y"] @ c
        centre = tf.reduce_mean(left, 0)
        logits = tf.matmul(left - mean, right, transpose_b=True)
        labels = tf.range(tf.shape(logits)[0])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        grads, norm = tf.clip_by_global_norm(tf.gradients(loss, [w, c]), 0.5)
        train = v1.train.AdamOptimizer(0.05).apply_gradients(zip(grads, [w, c], strict=True))
        with tf.control_dependencies([loss]):
            moved = v1.assign_sub(mean, 0.1 * (mean.read_value() - centre))
        return Step(loss, [train, moved], {"norm": norm, "best": tf.reduce_max(logits, 1)})

    return assemble(options, INPUTS, body)


PROGRAMS: Mapping[str, Callable[[Options], Built]] = {
    "ordered_updates": ordered_updates,
    "counted": counted,
    "random_and_branch": random_and_branch,
    "contrastive": contrastive,
}
