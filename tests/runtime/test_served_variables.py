"""What functions hold of variables on servers is counted among all objects of the program, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite.runtime.function.mirrored_variables import Mirrored
from autograph_rewrite.runtime.function.served_variables import Held, Served, references


class Hidden:
    """An object that does not tell its class, as numpy's open files and dead proxies do not."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


def test_objects_that_hide_their_class_are_passed_over() -> None:
    there = [Hidden()]
    Held()._look()
    assert not references([there])


class Source:
    """Has the value of a variable, and brings it when it is asked."""

    def __init__(self, mirrored: Mirrored) -> None:
        self._mirrored, self.value = mirrored, mirrored.value()

    def bring(self, wanted: Sequence[Served]) -> None:
        """Write it."""
        self._mirrored.write(self.value)


def test_a_variable_whose_value_is_elsewhere_gives_back_its_memory_until_it_is_read() -> None:
    variable = tf.Variable(np.arange(6.0).reshape(2, 3))
    handle = variable.handle
    mirrored = Mirrored(handle, "float64", [2, 3])
    mirrored.served = Served(variable, Held())
    mirrored.leave_to(Source(mirrored), free=False)
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).shape == [2, 3]
    mirrored.leave_to(Source(mirrored), free=True)
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).shape == [0]
    np.testing.assert_array_equal(variable.numpy(), np.arange(6.0).reshape(2, 3))
    assert mirrored.served.source is None
