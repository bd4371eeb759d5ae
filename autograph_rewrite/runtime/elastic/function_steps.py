"""The steps of a distributed function in an elastic job: how its variables are kept, and come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.elastic.own_loop import OwnLoop
from autograph_rewrite.training_graph import TrainingGraph


class FunctionSteps:
    """The steps of one distributed function.

    Args:
        loop: of this process.
        name: of the function.
    """

    def __init__(self, loop: OwnLoop, name: str) -> None:
        self._tf = tensorflow()
        self._loop, self._name = loop, loop.unique(name)
        self._handles: dict[str, tuple[Any, Any]] = {}

    def before(self, item: TrainingGraph) -> None:
        """Before a step: give variables that are new the values that they had, and take a snapshot if it is time to.

        Args:
            item: the trace of the function that the step runs.

        Raises:
            ConfigError: nobody leads the program back to where a snapshot was taken.
        """
        captures = item.binding.captures
        new = {c.name: c.value for c in captures if c.name is not None and c.name not in self._handles}
        if new:
            types = {name: self._tf.as_dtype(item.variables[name].dtype) for name in new}
            self._handles |= {name: (handle, types[name]) for name, handle in new.items()}
        self._loop.before(self._name, self._read)
        for name, value in self._loop.values(self._name, new).items():
            handle, dtype = self._handles[name]
            self._tf.raw_ops.AssignVariableOp(resource=handle, value=self._tf.constant(value, dtype))

    def after(self) -> None:
        """Count a step."""
        self._loop.after(self._name)

    def _read(self) -> Mapping[str, Any]:
        read = self._tf.raw_ops.ReadVariableOp
        return {name: read(resource=handle, dtype=dtype).numpy() for name, (handle, dtype) in self._handles.items()}
