"""A custom training loop: tape, global-norm clipping, decoupled weight decay, moving average of the weights.

Every weight is updated twice per step and read by its average afterwards, so order matters.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .case import BuiltFunction, Case, Options
from .data import Input
from .optimizers import KERAS_OPTIMIZERS
from .stepping import apply, finish, variable
from .training import reduced

_SHAPES = {"tiny": (4, 6, 2), "large": (512, 2048, 64)}  # features, hidden, targets


def build(options: Options) -> BuiltFunction:
    """Regress several targets at once."""
    features, units, targets = _SHAPES[options.size]
    w1, b1 = variable(options, "w1", (features, units)), variable(options, "b1", (units,), 0.1)
    w2 = variable(options, "w2", (units, targets))
    weights = [w1, b1, w2]
    averages = [tf.Variable(each, trainable=False, name=f"{each.name[:-2]}_average") for each in weights]
    optimizer = KERAS_OPTIMIZERS[options.optimizer]()

    def step(x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            predictions = tf.matmul(tf.nn.swish(tf.matmul(x, w1) + b1), w2)
            loss = reduced(tf.reduce_sum(tf.square(predictions - y), axis=1), options.reduction)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.5)
        apply(optimizer, gradients, weights)
        for weight in (w1, w2):
            weight.assign_sub(0.01 * weight)
        for average, weight in zip(averages, weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"loss": loss, "norm": norm, "predictions": predictions}

    inputs = (Input("x", "float", (features,)), Input("y", "float", (targets,)))
    return finish(options, inputs, step, weights, optimizer, averages)


CASES = (Case(name="custom_loop", kind="function", family="dense", builder=build),)
