"""Graphs that do more than one update from one loss; each function makes one, and names its train ops and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.training import placeholder, v1, variable

WIDTH = 4
Names = tuple[Sequence[str], Sequence[str]]


def predicted(units: int = 3) -> Any:
    """Return a prediction from the input `x` and a trained `w`."""
    w = variable("w", np.linspace(-1, 1, WIDTH * units).reshape(WIDTH, units))
    return placeholder("x", None, WIDTH) @ w


def named(**tensors: Any) -> list[str]:
    """Name tensors; return the names."""
    return [tf.identity(tensor, name=name).op.name for name, tensor in tensors.items()]


def clipped() -> Names:
    """Clip by the norm of all gradients, which is fetched as well, with a rate that decays."""
    y = predicted() + variable("b", np.zeros(3))
    loss = tf.reduce_mean(tf.square(y - 1))
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.AdamOptimizer(v1.train.exponential_decay(0.1, step, 2, 0.5))
    gradients, trained = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.3)
    optimizer.apply_gradients(zip(clipped, trained, strict=True), step, name="train")
    return ["train"], named(loss=loss, norm=norm)


def averaged() -> Names:
    """Keep a moving average of the weights, updated behind the train op."""
    loss = tf.reduce_mean(tf.square(predicted() - 1))
    step = v1.train.get_or_create_global_step()
    descent = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step)
    average = v1.train.ExponentialMovingAverage(0.9, step)
    with tf.control_dependencies([descent]):
        tf.group(average.apply(v1.trainable_variables()), name="train")
    return ["train"], named(loss=loss)


def fetched_after() -> Names:
    """Fetch what holds only once the update is done: the weights, their norm, and a prediction."""
    y = predicted()
    loss = tf.reduce_mean(tf.square(y - 1))
    w = v1.trainable_variables()[0]
    descent = v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    with tf.control_dependencies([descent]):
        new = w.read_value()
        outputs = named(loss=loss, new=new, norm=tf.norm(new), rows=tf.reduce_sum(new, 1))
    return ["train"], outputs


def two_players() -> Names:
    """Train two halves against each other, each by an op of its own."""
    y = predicted()
    critic = variable("critic", np.linspace(0.5, -0.5, 3).reshape(3, 1))
    score = tf.reduce_mean(tf.sigmoid(y @ critic))
    one, two = v1.trainable_variables()
    adam = v1.train.AdamOptimizer
    adam(0.1).minimize(score, var_list=[one], name="one")
    adam(0.05).minimize(-score, var_list=[two], name="two")
    return ["one", "two"], named(score=score)


def accumulated() -> Names:
    """Add up the gradients of two steps and apply them in a branch."""
    loss = tf.reduce_mean(tf.square(predicted() - 1))
    w = v1.trainable_variables()[0]
    held = v1.get_variable("held", initializer=np.zeros((WIDTH, 3)), use_resource=True, trainable=False)
    count = v1.get_variable("count", initializer=np.int64(0), use_resource=True, trainable=False)
    (slope,) = v1.gradients(loss, [w])
    optimizer = v1.train.AdamOptimizer(0.1)
    with tf.control_dependencies([held.assign_add(slope), count.assign_add(1)]):

        def apply() -> Any:
            with tf.control_dependencies([optimizer.apply_gradients([(held.read_value() / 2, w)])]):
                return tf.identity(held.assign(tf.zeros_like(held)))

        v1.cond(tf.equal(count.read_value() % 2, 0), apply, lambda: held.read_value(), name="branch")
        done = v1.get_default_graph().get_operations()[-1]
    tf.group(done, name="train")
    return ["train"], named(loss=loss)


def counted() -> Names:
    """Count and keep statistics in variables that no optimizer knows; some are written twice."""
    y = predicted()
    loss = tf.reduce_mean(tf.square(y - 1))
    make = lambda name, value: v1.get_variable(name, initializer=value, use_resource=True, trainable=False)  # noqa: E731
    seen, largest, flags = make("seen", np.int32(0)), make("largest", 0.0), make("flags", np.zeros(3, bool))
    mean = make("mean", np.zeros(3))
    updates = [
        seen.assign_add(tf.shape(y)[0]),
        largest.assign(tf.maximum(largest, tf.cast(tf.reduce_max(tf.concat([y, [[-9.0] * 3]], 0)), tf.float32))),
        flags.assign(tf.logical_or(flags, tf.reduce_any(y > 1, 0))),
        mean.assign_sub(0.1 * (mean - tf.reduce_sum(y, 0))),
    ]
    descent = v1.train.RMSPropOptimizer(0.05).minimize(loss)
    tf.group(descent, *updates, name="train")
    return ["train"], named(loss=loss)


def looked_up(optimizer: Callable[[], Any]) -> Callable[[], Names]:
    """Look rows up twice in one table, and use it once whole: tied."""

    def build() -> Names:
        x = placeholder("x", None, WIDTH)
        rows = v1.get_variable("rows", initializer=np.linspace(-1, 1, 21).reshape(7, 3), use_resource=True)
        other = v1.get_variable("other", initializer=np.linspace(1, -1, 21).reshape(7, 3), use_resource=True)
        ids = tf.cast(tf.math.floormod(tf.cast(tf.round(3 * x), tf.int32), 7), tf.int64)
        y = tf.gather(rows, ids[:, :2]) + tf.gather(other, ids[:, 2:]) * tf.gather(rows, ids[:, 1:3])
        loss = tf.reduce_sum(tf.square(y - 1)) / 30.0
        optimizer().minimize(loss, name="train")
        return ["train"], named(loss=loss)

    return build


def with_words() -> Names:
    """Use a table of strings, and write a summary."""
    y = predicted()
    content = v1.lookup.KeyValueTensorInitializer(["low", "high"], np.array([0.5, 2.0]))
    table = v1.lookup.StaticHashTable(content, default_value=1.0)
    weight = tf.stop_gradient(tf.reshape(table.lookup(tf.where(y[:, 0] > 0, "high", "low")), [-1, 1]))
    loss = tf.reduce_mean(tf.square(y - 1) * weight)
    v1.train.AdagradOptimizer(0.1).minimize(loss, name="train")
    v1.summary.scalar("loss_of_step", tf.cast(loss, tf.float32))
    summary = v1.summary.merge_all()
    return ["train"], [*named(loss=loss, words=tf.where(y > 0, "high", "low")), summary.op.name]


def by_reference() -> Names:
    """Use the variables of TensorFlow 1."""
    x = placeholder("x", None, WIDTH)
    w = v1.get_variable("w", initializer=np.linspace(-1, 1, 12).reshape(WIDTH, 3), use_resource=False)
    step = v1.get_variable("step", initializer=np.int64(0), use_resource=False, trainable=False)
    loss = tf.reduce_mean(tf.square(x @ w - 1))
    v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step, name="train")
    return ["train"], named(loss=loss)


def low_precision() -> Names:
    """Compute in bfloat16 and float16, with numbers that both hold exactly: gradients are cast on their way."""
    x = tf.cast(tf.round(placeholder("x", None, WIDTH)), tf.bfloat16)
    w = v1.get_variable("w", initializer=np.ones((WIDTH, 3), np.float32), use_resource=True)
    h = v1.get_variable("h", initializer=np.ones(3, np.float16), use_resource=True)
    y = tf.cast(x @ tf.cast(w, tf.bfloat16), tf.float32)
    loss = tf.reduce_sum(y) + tf.cast(tf.reduce_sum(tf.cast(tf.shape(x)[0], tf.float16) * h), tf.float32)
    v1.train.GradientDescentOptimizer(0.125).minimize(loss, name="train")
    return ["train"], named(examples=tf.shape(x)[0])


def normalised() -> Names:
    """Normalise over the batch, with moving averages that follow the update."""
    y = predicted()
    mean, variance = tf.nn.moments(y, [0])
    make = lambda name, value: v1.get_variable(name, initializer=value, use_resource=True, trainable=False)  # noqa: E731
    moving = [make("mean", np.zeros(3)), make("variance", np.ones(3))]
    scale = variable("scale", np.linspace(0.5, 1.5, 3))
    z = (y - mean) / tf.sqrt(variance + 1e-3) * scale
    loss = tf.reduce_mean(tf.square(z - 1)) + tf.reduce_mean(tf.abs(y))
    updates = [m.assign_sub(0.1 * (m - v)) for m, v in zip(moving, (mean, variance), strict=True)]
    with tf.control_dependencies(updates):
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
    return ["train"], named(loss=loss)


def drawn() -> Names:
    """Drop out with seeds."""
    y = tf.nn.dropout(predicted(8), 0.4, seed=3)
    loss = tf.reduce_mean(tf.square(y - 1))
    v1.train.FtrlOptimizer(0.1).minimize(loss, name="train")
    return ["train"], named(loss=loss, y=y)


def looped() -> Names:
    """Read a variable in a loop, and another one in a branch."""
    x = placeholder("x", None, WIDTH)
    w = variable("w", 0.3 * np.eye(WIDTH))
    b = variable("b", np.linspace(0, 1, WIDTH))
    state = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, tf.tanh(s @ w)), [tf.constant(0), x])[1]
    step = v1.train.get_or_create_global_step()
    state = v1.cond(tf.equal(step % 2, 0), lambda: state + b, lambda: state * b * 2)
    loss = tf.reduce_sum(tf.square(state)) / 10.0
    v1.train.AdamOptimizer(0.05).minimize(loss, step, name="train")
    return ["train"], named(loss=loss)


def checked() -> Names:
    """Refuse large inputs, in one of two gradients that are clipped together."""
    x = placeholder("x", None, WIDTH)
    w, v = (
        variable("w", np.linspace(-1, 1, 12).reshape(WIDTH, 3)),
        variable("v", np.linspace(1, -1, 12).reshape(WIDTH, 3)),
    )
    with tf.control_dependencies([v1.assert_less(tf.reduce_max(tf.abs(x)), np.float64(50.0))]):
        y = tf.identity(x) @ w
    losses = [tf.reduce_sum(tf.square(y - 1)), tf.reduce_sum(tf.square(x @ v - 1))]
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    slopes = tf.clip_by_global_norm([tf.gradients(loss, [u])[0] for loss, u in zip(losses, (w, v), strict=True)], 1.0)[
        0
    ]
    optimizer.apply_gradients(zip(slopes, (w, v), strict=True), name="train")
    return ["train"], named(loss=losses[0])


def in_a_branch() -> Names:
    """Update two variables in every second step only, and a third, whose gradient reads them, in each."""
    hidden = predicted() + variable("b", np.zeros(3))
    u = variable("u", np.linspace(1, -1, 6).reshape(3, 2))
    loss = tf.reduce_mean(tf.square(tf.tanh(hidden) @ u - 1))
    step = v1.get_variable("step", initializer=np.float64(0), use_resource=True, trainable=False)
    now = step.read_value()
    *first, slope = tf.gradients(loss, v1.trainable_variables())
    updated = v1.trainable_variables()[:2]

    def update() -> Any:
        with tf.control_dependencies([w.assign_sub(0.1 * g) for w, g in zip(updated, first, strict=True)]):
            return tf.constant(1.0, tf.float64)

    done = tf.cond(tf.equal(now % 2, 0), update, lambda: tf.constant(0.0, tf.float64))
    with tf.control_dependencies([now, done]):
        tf.group(u.assign_sub(0.1 * slope), step.assign_add(1.0), name="train")
    return ["train"], named(loss=loss, done=done)


def kept_in_a_branch() -> Names:
    """Keep a gradient in one step, and update two variables with it in the next, as Keras accumulates them."""
    loss = tf.reduce_mean(tf.square(predicted() + variable("b", np.zeros(3)) - 1))
    slopes = tf.gradients(loss, v1.trainable_variables())
    kept, step = (
        v1.get_variable(name, initializer=start, use_resource=True, trainable=False)
        for name, start in (("kept", np.zeros(3)), ("step", np.float64(0)))
    )
    updated, now = v1.trainable_variables(), step.read_value()

    def update() -> Any:
        total = kept + slopes[1]
        scale = tf.reduce_mean(total)
        with tf.control_dependencies([updated[0].assign_sub(scale * slopes[0]), updated[1].assign_sub(0.1 * total)]):
            return tf.identity(kept.assign(tf.zeros([3], tf.float64)))

    done = tf.cond(tf.equal(now % 2, 1), update, lambda: tf.identity(kept.assign(kept + slopes[1])))
    with tf.control_dependencies([now, done]):
        tf.group(step.assign_add(1.0), name="train")
    return ["train"], named(loss=loss)


def by_the_program() -> Names:
    """Let Python code and a table of the program take part in what leads from a gradient to its update."""
    y = predicted()
    loss = tf.reduce_mean(tf.square(y - 1))
    (slope,) = tf.gradients(loss, v1.trainable_variables())
    halved = tf.ensure_shape(tf.numpy_function(lambda value: 0.5 * value, [slope], tf.float64), slope.shape)
    keys, values = tf.constant([0, 1], tf.int64), tf.constant([1.0, 0.25], tf.float64)
    factors = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1.0)
    factor = factors.lookup(tf.cast(tf.norm(slope) > 0.5, tf.int64))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    optimizer.apply_gradients([(factor * halved, v1.trainable_variables()[0])], name="train")
    return ["train"], named(loss=loss)


def summed() -> Names:
    """Add up what the examples hold."""
    loss = tf.reduce_sum(predicted())
    v1.train.GradientDescentOptimizer(1.0).minimize(loss, name="train")
    return ["train"], named(loss=loss)


def adam() -> Any:
    return v1.train.AdamOptimizer(0.1)


def momentum() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)
