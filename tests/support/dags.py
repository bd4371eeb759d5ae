"""Small graphs that are no chains: branches that differ in size, and join again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.training import placeholder, variable

Forward = Callable[[], Mapping[str, Any]]


def _dense(name: str, h: Any, width: int) -> Any:
    weights = np.random.default_rng(sum(map(ord, name))).normal(size=(h.shape[-1], width)) * 0.4
    return tf.tanh(h @ variable(name, weights), name=f"{name}_act")


def _loss(h: Any, name: str = "y") -> Any:
    return tf.reduce_mean((h - placeholder(name, None, h.shape[-1])) ** 2)


def fork_join() -> Mapping[str, Any]:
    """Return two branches of two and three layers."""
    x = placeholder("x", None, 8)
    h = _dense("a", x, 16)
    left = _dense("l2", _dense("l1", h, 32), 16)
    right = _dense("r3", _dense("r2", _dense("r1", h, 8), 24), 16)
    h = _dense("b", left * right, 16)
    return {"loss": _loss(_dense("c", h, 8))}


def diamond() -> Mapping[str, Any]:
    """Return two branches, one wide and one narrow, twice."""
    x = placeholder("x", None, 8)
    h = _dense("a", x, 24)
    top, bottom = _dense("t", h, 32), _dense("u", h, 8)
    h = _dense("j", tf.concat([top, bottom], 1), 16)
    top, bottom = _dense("t2", h, 8), _dense("u2", h, 32)
    return {"loss": _loss(_dense("k", tf.concat([top, bottom], 1), 8))}


def long_skip() -> Mapping[str, Any]:
    """Return a value that is read at once, and five layers later."""
    x = placeholder("x", None, 8)
    s = h = _dense("a", x, 16)
    for i, width in enumerate((32, 24, 8, 24, 16)):
        h = _dense(f"w{i}", h, width)
    h = h * s
    h = _dense("b", h, 24)
    return {"loss": _loss(_dense("c", h, 8))}


def u_net() -> Mapping[str, Any]:
    """Return what is read once on the way down, and once on the way up."""
    x = placeholder("x", None, 16)
    one = _dense("e1", x, 32)
    two = _dense("e2", one, 16)
    three = _dense("e3", two, 8)
    bottom = _dense("m", three, 8)
    h = _dense("d3", tf.concat([bottom, three], 1), 16)
    h = _dense("d2", tf.concat([h, two], 1), 32)
    h = _dense("d1", tf.concat([h, one], 1), 16)
    return {"loss": _loss(h)}


def two_heads() -> Mapping[str, Any]:
    """Return two losses behind one trunk."""
    x = placeholder("x", None, 8)
    h = _dense("a", x, 32)
    h = _dense("b", h, 16)
    h = _dense("c", h, 24)
    one = _dense("p2", _dense("p1", h, 32), 8)
    two = _dense("q3", _dense("q2", _dense("q1", h, 16), 16), 8)
    return {"loss": _loss(one) + _loss(two, "z")}


def unbalanced() -> Mapping[str, Any]:
    """Return layers whose sizes differ by sixteen times."""
    x = placeholder("x", None, 4)
    h = _dense("a", x, 64)
    h = _dense("b", h, 4)
    side = _dense("s", h, 64)
    h = _dense("d", _dense("c", h, 48), 8)
    h = h * _dense("s2", side, 8)
    h = _dense("e", h, 64)
    return {"loss": _loss(_dense("f", h, 4))}


def residual_blocks() -> Mapping[str, Any]:
    """Return blocks of two layers beside an identity."""
    x = placeholder("x", None, 16)
    h = _dense("a", x, 16)
    for i, width in enumerate((32, 8, 48)):
        h = h + _dense(f"o{i}", _dense(f"i{i}", h, width), 16)
    return {"loss": _loss(h)}


def dense_net() -> Mapping[str, Any]:
    """Return layers that read all before them."""
    x = placeholder("x", None, 8)
    made = [x]
    for i, width in enumerate((8, 16, 8, 24)):
        made.append(_dense(f"w{i}", tf.concat(made, 1), width))
    return {"loss": _loss(_dense("o", tf.concat(made, 1), 8))}


def gates() -> Mapping[str, Any]:
    """Return layers that a gate mixes with what they read."""
    x = placeholder("x", None, 16)
    h = _dense("a", x, 16)
    for i, width in enumerate((16, 32)):
        gate = tf.sigmoid(h @ variable(f"g{i}", np.eye(16) * 0.3 + 0.1 * i))
        h = gate * _dense(f"v{i}", _dense(f"u{i}", h, width), 16) + (1.0 - gate) * h
    return {"loss": _loss(h)}


def shared_root() -> Mapping[str, Any]:
    """Return three branches from one layer, one of which reads another."""
    x = placeholder("x", None, 8)
    s = _dense("s", x, 24)
    one = _dense("a2", _dense("a1", s, 32), 16)
    two = _dense("b2", _dense("b1", s, 8), 16)
    three = _dense("c1", tf.concat([one, s], 1), 16)
    return {"loss": _loss(_dense("o", one * two + three, 8))}


_DAGS = (fork_join, diamond, long_skip, u_net, two_heads, unbalanced, residual_blocks, dense_net, gates, shared_root)
DAGS: Mapping[str, Forward] = {make.__name__: make for make in _DAGS}
