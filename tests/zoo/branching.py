"""A model with two `tf.cond`s: one decided by the step counter, one by the batch.

The second predicate is a mean over the batch: every replica must take the branch that the whole batch takes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from .case import Built, Case, Options
from .data import Input
from .training import Forward, Variables, control_flow, training_graph

_WIDTHS = {"tiny": (4, 5), "large": (512, 1024)}


def build(options: Options, v2: bool) -> Built:
    """Regress, with an activation that alternates and a loss that depends on the batch mean."""
    features, units = _WIDTHS[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        step = tf.compat.v1.train.get_global_step()
        left, right = variables("left", (features, units)), variables("right", (features, units))
        x = inputs["x"]
        hidden = tf.cond(
            tf.equal(step % 2, 0),
            lambda: tf.tanh(tf.matmul(x, left)),
            lambda: tf.nn.softplus(tf.matmul(x, right)),
        )
        predictions = variables.dense(hidden, "predictions", 1)[:, 0]
        error = predictions - inputs["y"]
        losses = tf.cond(tf.reduce_mean(error) > 0, lambda: tf.square(error), lambda: 2 * tf.math.log(tf.cosh(error)))
        return Forward(losses=losses, outputs={"predicted": predictions})

    with control_flow(v2):
        return training_graph(options, (Input("x", "float", (features,)), Input("y", "float", ())), forward)


CASES = (
    Case(name="cond_v2", kind="graph", family="branch", builder=partial(build, v2=True)),
    Case(name="cond_v1", kind="graph", family="branch", builder=partial(build, v2=False)),
)
