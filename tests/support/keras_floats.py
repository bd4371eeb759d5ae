"""Keras' default float type, set for a while: of weights and of layers, each of which Keras remembers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keras_floats(dtype: str) -> Iterator[None]:
    """Let Keras make everything in a float type; afterwards in the one that it had before."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
