"""Mixed precision with a dynamic loss scale: an overflow anywhere skips the step everywhere.

The third batch overflows, in its last example only: the replicas that do not hold it see finite gradients,
and must skip the step all the same. In float64 the compute type is float64 too, so that the logic is tested
exactly; in float32 the forward and backward passes run in float16, whose sums depend on their order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from .case import Array, BuiltFunction, Case, Options
from .data import Input
from .optimizers import KERAS_OPTIMIZERS
from .stepping import apply, finish, variable
from .training import reduced

_SHAPES = {"tiny": (4, 6), "large": (1024, 2048)}
_OVERFLOWING_STEP = 2
_HUGE = {"float64": 1e200, "float32": 6e4}


def build(options: Options) -> BuiltFunction:
    """Regress a scalar."""
    features, units = _SHAPES[options.size]
    compute = "float64" if options.dtype == "float64" else "float16"
    w1, w2 = variable(options, "w1", (features, units)), variable(options, "w2", (units, 1))
    bias = variable(options, "bias", (units,), 0.1)
    weights = [w1, bias, w2]
    scale = tf.Variable(2.0**7, dtype=options.dtype, trainable=False, name="scale")
    good_steps = tf.Variable(0, dtype=tf.int32, trainable=False, name="good_steps")
    optimizer = KERAS_OPTIMIZERS[options.optimizer]()

    def accept(gradients: list[Any]) -> Any:
        apply(optimizer, gradients, weights)
        good_steps.assign_add(1)
        grow = tf.equal(good_steps % 2, 0)
        scale.assign(tf.where(grow, scale * 2, scale))
        return tf.constant(True)

    def reject() -> Any:
        good_steps.assign(0)
        scale.assign(scale / 2)
        return tf.constant(False)

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(tf.cast(x, compute), tf.cast(w1, compute)) + tf.cast(bias, compute))
            predictions = tf.cast(tf.matmul(hidden, tf.cast(w2, compute))[:, 0], options.dtype)
            loss = reduced(tf.square(predictions - y), options.reduction)
            scaled = loss * scale
        gradients = [gradient / scale for gradient in tape.gradient(scaled, weights)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        applied = tf.cond(finite, lambda: accept(gradients), reject)
        return {"loss": tf.where(finite, loss, tf.zeros_like(loss)), "applied": applied}

    inputs = (Input("x", "float", (features,)), Input("y", "float", ()))
    built = finish(options, inputs, step, weights, optimizer, [scale, good_steps])

    def feeds(at: int, batch: int) -> tuple[Array, ...]:
        x, y = built.feeds(at, batch)
        if at == _OVERFLOWING_STEP:
            x[-1] = np.abs(x[-1]) * _HUGE[options.dtype]
        return x, y

    return replace(built, feeds=feeds)


CASES = (Case(name="loss_scaling", kind="function", family="branch", builder=build, loose={"float32": 5e-3}),)
