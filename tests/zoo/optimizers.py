"""The optimizers of the zoo: what TensorFlow v1 graphs and what Keras steps use, as two tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tests.support.chosen_keras import keras

v1 = tf.compat.v1.train
_NAME = "optimizer"

GRAPH_OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: v1.GradientDescentOptimizer(0.05),
    "momentum": lambda: v1.MomentumOptimizer(0.02, 0.9, use_nesterov=True),
    "adam": lambda: v1.AdamOptimizer(0.01),
    "adagrad": lambda: v1.AdagradOptimizer(0.05),
    "rmsprop": lambda: v1.RMSPropOptimizer(0.01, momentum=0.9, centered=True),
    "ftrl": lambda: v1.FtrlOptimizer(0.2, l1_regularization_strength=1e-4),
    "adadelta": lambda: v1.AdadeltaOptimizer(0.5, epsilon=1e-4),
}

# Named, because Keras would number them: variable paths must not depend on what was built before. RMSprop is not
# centered: with repeated sparse rows Keras takes roots of negative numbers there, and then fails, on one device too.
KERAS_OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "sgd": lambda **k: keras.optimizers.SGD(0.05, name=_NAME, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.01, name=_NAME, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(0.01, weight_decay=0.02, name=_NAME, **k),
    "adagrad": lambda **k: keras.optimizers.Adagrad(0.05, name=_NAME, **k),
    "rmsprop": lambda **k: keras.optimizers.RMSprop(0.01, momentum=0.9, name=_NAME, **k),
    "lion": lambda **k: keras.optimizers.Lion(0.005, name=_NAME, **k),
    "adafactor": lambda **k: keras.optimizers.Adafactor(0.05, name=_NAME, **k),
    "ftrl": lambda **k: keras.optimizers.Ftrl(0.2, l1_regularization_strength=1e-4, name=_NAME, **k),
    "nadam": lambda **k: keras.optimizers.Nadam(0.01, name=_NAME, **k),
}


def optimizers_for(kind: str) -> tuple[str, ...]:
    """Return the optimizer names that an entry of this kind can be built with."""
    return tuple(GRAPH_OPTIMIZERS if kind == "graph" else KERAS_OPTIMIZERS)
