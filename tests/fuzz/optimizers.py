"""Optimizers: TensorFlow 1's, Keras', and those that programs write by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.fuzz.net import D, Net

v1 = tf.compat.v1

GRAPH: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda rate: v1.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
    "nesterov": lambda rate: v1.train.MomentumOptimizer(rate, 0.8, use_nesterov=True),
    "adam": lambda rate: v1.train.AdamOptimizer(rate),
    "adagrad": lambda rate: v1.train.AdagradOptimizer(rate),
    "rmsprop": lambda rate: v1.train.RMSPropOptimizer(rate, momentum=0.5, centered=True),
    "ftrl": lambda rate: v1.train.FtrlOptimizer(rate, l1_regularization_strength=1e-3),
}
KERAS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Nadam", "Lion", "Ftrl", "Adafactor")


def keras_optimizer(name: str, dice: Any) -> Any:
    """Return a Keras optimizer; its options are drawn."""
    import keras

    options = dice.choice([{}, {}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"weight_decay": 0.01}])
    if name == "AdamW":
        options = {}
    if name == "SGD":
        options = options | dice.choice([{}, {"momentum": 0.9}])
    return getattr(keras.optimizers, name)(0.02, name="optimizer", **options)


def by_hand(net: Net, kind: str, pairs: list[tuple[Any, Any]], rate: Any) -> list[Any]:
    """Return updates that are written with assignments."""
    done = []
    for g, w in pairs:
        g = tf.convert_to_tensor(g)
        shape = tuple(w.shape)
        if kind == "plain":
            done.append(v1.assign_sub(w, rate * g))
        elif kind == "written_momentum":
            m = net.stored("m", 0.0 * net.numbers.normal(size=shape))
            new = 0.9 * m + g
            with tf.control_dependencies([v1.assign(m, new)]):
                done.append(v1.assign_sub(w, rate * new))
        elif kind == "written_adam":
            done.append(_adam(net, w, g, rate, shape))
        else:  # the sign of the gradient
            done.append(v1.assign(w, w - rate * tf.sign(g) * tf.cast(tf.abs(g) > 1e-6, D)))
    return done


def _adam(net: Net, w: Any, g: Any, rate: Any, shape: tuple[int, ...]) -> Any:
    m, v = (net.stored(n, 0.0 * net.numbers.normal(size=shape)) for n in ("m", "v"))
    new_m, new_v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    step = rate * new_m / (tf.sqrt(new_v) + 1e-3)
    with tf.control_dependencies([step]):
        slots = [v1.assign(m, new_m), v1.assign(v, new_v)]
    with tf.control_dependencies(slots):
        return v1.assign_sub(w, step)


HANDS = ("plain", "written_momentum", "written_adam", "sign")
