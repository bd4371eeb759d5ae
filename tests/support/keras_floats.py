"""Keras' default float type, set for a while: of weights and of layers, each of which Keras remembers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def keras_floats(dtype: str, library: Any = None) -> Iterator[None]:
    """Let Keras make everything in a float type; afterwards in the one that it had before.

    Args:
        dtype: its name.
        library: Keras 3 or tf_keras; left out, that of `tf.keras`.
    """
    from tests.support.chosen_keras import keras as chosen

    keras = library or chosen
    before = keras.backend.floatx(), keras.mixed_precision.global_policy()
    keras.backend.set_floatx(dtype)
    keras.mixed_precision.set_global_policy(dtype)
    try:
        yield
    finally:
        keras.backend.set_floatx(before[0])
        keras.mixed_precision.set_global_policy(before[1])
