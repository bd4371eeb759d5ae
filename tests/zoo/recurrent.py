"""Recurrent networks by `tf.while_loop` and TensorArray: functional loops (v2) and frames (v1).

The LSTM has peepholes and is time-major, so its batch axis is 1; the GRU is batch-major and masks by length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from .case import Built, Case, Options
from .data import Input, integers
from .training import Forward, Variables, control_flow, training_graph

_SHAPES = {"tiny": (4, 3, 5), "large": (32, 64, 128)}  # time steps, features, units
_CLASSES = 3


def _scan(cell: Any, xs: Any, state: tuple[Any, ...], steps: int) -> tuple[Any, tuple[Any, ...]]:
    """Run `cell` over time-major `xs`; return the stacked outputs and the last state."""
    source = tf.TensorArray(xs.dtype, steps).unstack(xs)
    sink = tf.TensorArray(xs.dtype, steps, element_shape=state[0].shape)

    def body(t: Any, out: Any, *state: Any) -> tuple[Any, ...]:
        state = cell(t, source.read(t), state)
        return (t + 1, out.write(t, state[0]), *state)

    _, sink, *last = tf.while_loop(lambda t, *_: t < steps, body, (tf.constant(0), sink, *state))
    return sink.stack(), tuple(last)


def _lstm(variables: Variables, units: int, features: int) -> Any:
    kernel = variables("kernel", (features + units, 4 * units))
    bias = variables("bias", (4 * units,), scale=0.1)
    peephole = variables("peephole", (3, units))

    def cell(_: Any, x: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        h, c = state
        i, f, o, g = tf.split(tf.matmul(tf.concat([x, h], 1), kernel) + bias, 4, axis=1)
        c = tf.sigmoid(f + peephole[0] * c) * c + tf.sigmoid(i + peephole[1] * c) * tf.tanh(g)
        return tf.sigmoid(o + peephole[2] * c) * tf.tanh(c), c

    return cell


def _gru(variables: Variables, units: int, features: int, lengths: Any) -> Any:
    gates = variables("gates", (features + units, 2 * units))
    candidate = variables("candidate", (features + units, units))
    bias = variables("bias", (2 * units,), scale=0.1)

    def cell(t: Any, x: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        (h,) = state
        r, z = tf.split(tf.sigmoid(tf.matmul(tf.concat([x, h], 1), gates) + bias), 2, axis=1)
        fresh = z * h + (1 - z) * tf.tanh(tf.matmul(tf.concat([x, r * h], 1), candidate))
        return (tf.where((t < lengths)[:, None], fresh, h),)

    return cell


def build_lstm(options: Options, v2: bool) -> Built:
    """Classify by the last hidden state plus the mean of all of them."""
    steps, features, units = _SHAPES[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        xs = inputs["x"]
        zeros = tf.zeros(tf.stack([tf.shape(xs)[1], units]), xs.dtype)
        outputs, (last, _) = _scan(_lstm(variables, units, features), xs, (zeros, zeros), steps)
        logits = variables.dense(last + tf.reduce_mean(outputs, 0), "logits", _CLASSES)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["y"], logits=logits)
        return Forward(losses=losses, outputs={"last": last})

    inputs = (Input("x", "float", (steps, features), axis=1), Input("y", "int32", (), integers(_CLASSES)))
    with control_flow(v2):
        return training_graph(options, inputs, forward)


def build_gru(options: Options, v2: bool) -> Built:
    """Regress on the state at each sequence's own length."""
    steps, features, units = _SHAPES[options.size]

    def forward(variables: Variables, inputs: dict[str, Any]) -> Forward:
        xs = tf.transpose(inputs["x"], [1, 0, 2])
        zeros = tf.zeros_like(tf.matmul(xs[0], tf.zeros([features, units], xs.dtype)))
        outputs, (last,) = _scan(_gru(variables, units, features, inputs["length"]), xs, (zeros,), steps)
        predictions = variables.dense(last, "predictions", 1)[:, 0]
        losses = tf.math.squared_difference(predictions, inputs["y"])
        return Forward(losses=losses, penalty=None, outputs={"states": tf.transpose(outputs, [1, 0, 2])})

    inputs = (
        Input("x", "float", (steps, features)),
        Input("length", "int32", (), integers(steps + 1)),
        Input("y", "float", ()),
    )
    with control_flow(v2):
        return training_graph(options, inputs, forward)


CASES = (
    Case(name="lstm_v2", kind="graph", family="loop", builder=partial(build_lstm, v2=True)),
    Case(name="lstm_v1", kind="graph", family="loop", builder=partial(build_lstm, v2=False)),
    Case(name="gru_v2", kind="graph", family="loop", builder=partial(build_gru, v2=True)),
    Case(name="gru_v1", kind="graph", family="loop", builder=partial(build_gru, v2=False)),
)
