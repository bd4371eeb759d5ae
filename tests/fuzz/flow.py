"""Blocks with sequences, loops and branches: recurrent layers, attention, map_fn, cond, nested functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.fuzz.layers import Block, linear, residual, width
from tests.fuzz.net import D, Net

v1 = tf.compat.v1


def cell_of(net: Net, inputs: int, units: int) -> Callable[[Any, Any], Any]:
    """Return one step of a recurrent layer: (input, state) to state."""
    kind = net.dice.choice(["simple", "gru"])
    u = net.variable("u", (inputs + units, units))
    b = net.variable("b", (units,), scale=0.1)
    gate = net.variable("gate", (inputs + units, units)) if kind == "gru" else None

    def step(x: Any, state: Any) -> Any:
        new = tf.tanh(tf.concat([x, state], 1) @ u + b)
        if gate is None:
            return new
        z = tf.sigmoid(tf.concat([x, state], 1) @ gate)
        return z * state + (1 - z) * new

    return step


def recurrent(net: Net, h: Any) -> Any:
    """A recurrent layer over fed sequences; its last state, or all of them, joins."""
    steps, units = net.sequence("steps", 3), 3
    cell = cell_of(net, 3, units)
    start = tf.zeros([tf.shape(steps)[0], units], D) if net.chance(0.6) else tf.tanh(linear(net, h, units))
    ways = ["array", "scan", "state"] + ([] if net.style.function else ["dynamic_rnn", "dynamic_rnn"])
    way = net.dice.choice(ways)
    if way == "state":
        last = _last_state(net, cell, steps, start)
        return tf.concat([h, last], -1)
    if way == "scan":
        states = tf.transpose(tf.scan(lambda s, x: cell(x, s), tf.transpose(steps, [1, 0, 2]), start), [1, 0, 2])
    elif way == "array":
        states = _states_of(cell, steps, start)
    else:
        states = _dynamic_rnn(net, cell, steps, start)
    states = tf.ensure_shape(states, [net.style.batch, net.style.time, units])
    return tf.concat([h, _pooled(net, states)], -1)


def _last_state(net: Net, cell: Callable[[Any, Any], Any], steps: Any, start: Any) -> Any:
    """Return the state after all steps, or after as many as each example has."""
    lengths = net.input("lengths", dtype=tf.int32, kind="lengths") if net.chance(0.5) else None

    def body(t: Any, state: Any) -> Any:
        new = cell(steps[:, t], state)
        if lengths is not None:
            new = tf.where((t < lengths)[:, None], new, state)
        return t + 1, new

    return tf.while_loop(lambda t, _: t < tf.shape(steps)[1], body, [0, start])[1]


def _states_of(cell: Callable[[Any, Any], Any], steps: Any, start: Any) -> Any:
    length = tf.shape(steps)[1]
    rows = tf.TensorArray(D, length, element_shape=[None, 3]).unstack(tf.transpose(steps, [1, 0, 2]))
    done = tf.TensorArray(D, length)

    def body(t: Any, state: Any, done: Any) -> Any:
        new = cell(rows.read(t), state)
        return t + 1, new, done.write(t, new)

    _, _, done = tf.while_loop(lambda t, *_: t < length, body, [0, start, done])
    return tf.transpose(done.stack(), [1, 0, 2])


class Cell(tf.Module):
    """What v1's dynamic_rnn calls."""

    def __init__(self, step: Callable[[Any, Any], Any], units: int, seed: int | None) -> None:
        super().__init__()
        self.step, self.seed = step, seed
        self.state_size = self.output_size = units

    def zero_state(self, batch: Any, dtype: Any) -> Any:
        return tf.zeros([batch, self.state_size], dtype)

    def __call__(self, x: Any, state: Any, scope: Any = None) -> Any:
        state = self.step(x, state)
        return (state if self.seed is None else v1.nn.dropout(state, rate=0.3, seed=self.seed)), state


def _dynamic_rnn(net: Net, cell: Callable[[Any, Any], Any], steps: Any, start: Any) -> Any:
    lengths = net.input("lengths", dtype=tf.int32, kind="lengths") if net.chance(0.5) else None
    seed = net.dice.randint(1, 99) if net.chance(0.25) else None
    net.draws = net.draws or seed is not None
    # One iteration at a time: else the original itself draws its masks in any order.
    parallel = 1 if seed is not None else 32
    rnn = Cell(cell, int(start.shape[-1]), seed)
    return v1.nn.dynamic_rnn(
        rnn, steps, sequence_length=lengths, initial_state=start, dtype=D, parallel_iterations=parallel
    )[0]


def _pooled(net: Net, states: Any) -> Any:
    """Return one vector per example out of the vectors of its steps."""
    way = net.dice.choice(["last", "mean", "dense", "masked", "max"])
    if way == "last":
        return states[:, -1]
    if way == "mean":
        return tf.reduce_mean(states, 1)
    if way == "dense":
        return tf.reduce_sum(tf.tanh(linear(net, states, 3)), 1)
    if way == "max":
        return tf.reduce_max(states, 1)
    lengths = net.input("lengths", dtype=tf.int32, kind="lengths")
    mask = tf.sequence_mask(lengths, tf.shape(states)[1], dtype=D)
    return tf.reduce_sum(states * mask[:, :, None], 1) / tf.reduce_sum(mask, 1, keepdims=True)


def attention(net: Net, h: Any) -> Any:
    """Self attention over fed sequences or over looked up tokens, with or without a mask."""
    if net.chance(0.5):
        tokens = net.sequence("tokens", 4)
    else:
        tokens = tf.gather(net.variable("table", (6, 4)), net.ids("words", 6, "T"))
    q, k, v = (linear(net, tokens, 4, bias=False) for _ in range(3))
    scores = tf.matmul(q, k, transpose_b=True) / 2.0
    way = net.dice.choice(["full", "causal", "masked"])
    if way == "causal":
        length = tf.shape(tokens)[1]
        scores += (1.0 - tf.linalg.band_part(tf.ones([length, length], D), -1, 0)) * -1e3
    if way == "masked":
        mask = tf.sequence_mask(net.input("lengths", dtype=tf.int32, kind="lengths"), tf.shape(tokens)[1], dtype=D)
        scores += (1.0 - mask[:, None, :]) * -1e3
    return tf.concat([h, _pooled(net, tf.matmul(tf.nn.softmax(scores), v))], -1)


def repeated(net: Net, h: Any) -> Any:
    """One layer again and again, a fixed number of times or until the batch says so."""
    w = net.variable("w", (width(h), width(h)), scale=0.3)
    if net.chance(0.5):
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, tf.tanh(a @ w) + 0.1), [0, h])[1]
    limit = tf.constant(0.4, D)
    body = lambda i, a: (i + 1, 0.5 * tf.tanh(a @ w))  # noqa: E731
    return tf.while_loop(lambda i, a: (i < 4) & (tf.reduce_max(tf.abs(a)) > limit), body, [0, h])[1] + h


def growing(net: Net, h: Any) -> Any:
    """A loop whose state becomes longer along the batch."""
    shapes = [tf.TensorShape([]), tf.TensorShape([None, width(h)])]
    rows = tf.shape(h)[0]
    body = lambda i, a: (i + 1, tf.concat([a, 0.5 * a[:rows]], 0))  # noqa: E731
    grown = tf.while_loop(lambda i, _: i < 2, body, [0, h], shape_invariants=shapes)[1]
    return h + grown[-rows:]


def mapped(net: Net, h: Any) -> Any:
    """A function of one example, for all of them."""
    w = net.variable("w", (width(h), width(h)))
    one = lambda row: tf.tanh(tf.linalg.matvec(w, row))  # noqa: E731
    done = tf.vectorized_map(one, h) if net.style.function and net.chance(0.3) else tf.map_fn(one, h)
    return h + tf.ensure_shape(done, h.shape)


def branch(net: Net, h: Any) -> Any:
    """A branch that the batch decides about, or something that is fed."""
    way = net.dice.choice(["batch", "fed", "step"])
    if way == "batch":
        decision = tf.reduce_sum(h) > 0
    elif way == "fed":
        decision = net.input("switch", axis=None) > 0
    else:
        count = net.stored("branch_step", 0)
        decision = tf.equal(tf.cast(count, tf.int32) % 2, 0)
        net.update_behind(count, count + 1)
    w = net.variable("w", (width(h), width(h)))
    if net.chance(0.5):
        return tf.cond(decision, lambda: tf.tanh(h @ w), lambda: h * 0.5)
    return tf.cond(decision, lambda: h - tf.reduce_mean(h @ w, 0), lambda: h + 1.0)


def nested(net: Net, h: Any) -> Any:
    """A layer in a function of its own."""
    w = net.variable("w", (width(h), width(h)))
    inner = tf.function(lambda a: tf.nn.relu(a @ w) + tf.reduce_mean(a))
    return inner(h)


def switched_residual(net: Net, h: Any) -> Any:
    """A layer that a random number, one for the whole batch, leaves out: stochastic depth."""
    keep = tf.random.stateless_uniform([], [net.dice.randint(0, 99), 1], dtype=D) < 0.7
    return tf.where(keep, residual(net, h), h)


FLOW: dict[str, tuple[float, Block]] = {
    "recurrent": (3, recurrent),
    "attention": (2, attention),
    "repeated": (1, repeated),
    "growing": (0.4, growing),
    "mapped": (0.7, mapped),
    "branch": (1.2, branch),
    "nested": (0.7, nested),
    "switched_residual": (0.5, switched_residual),
}
"""How often a block is drawn, and the block."""
