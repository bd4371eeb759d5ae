"""A graph under comparison: initialised, stepped, and all of its variables read and assigned at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.diagnostics.stages import stage
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.session.open_session import open_session
from autograph_rewrite.runtime.session.variable_copies import Copy, copies_of
from autograph_rewrite.training_graph import TrainingGraph

Array = np.ndarray[Any, Any]
SCOPE = "autograph_rewrite_verify"


class TrainedGraph:
    """An original or rewritten item in a session of its own. Use it as a context manager.

    Args:
        item: the item.
        timeout: seconds after which a run counts as hung.
        config: a tf.compat.v1.ConfigProto for the session.

    Attributes:
        failures: what a run raises when the graph or a feed is wrong.
        unset: the variables that initialising gave no value.
    """

    def __init__(self, item: TrainingGraph, timeout: float, config: Any = None) -> None:
        self.item = item
        self.timeout = timeout
        self.unset: set[str] = set()
        stage("opening a session of TensorFlow")
        self._session = open_session(item, config=config)
        self._session.first.done()
        self._tf = tensorflow()
        self.failures: tuple[type[Exception], ...] = (self._tf.errors.OpError, ValueError, TypeError)
        self._outputs = {name: info.tensor for name, info in item.outputs.items()}
        self._reads: dict[str, tuple[Any, ...]] = {}
        self._writes: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._are_set: dict[str, Any] = {}
        with self._session.graph.as_default(), self._tf.name_scope(SCOPE):
            for name in item.variables:
                self._add_variable(name)

    def __enter__(self) -> TrainedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _add_variable(self, name: str) -> None:
        """Add what reads, writes and tests one variable, in all its copies."""
        variable, graph = self.item.variables[name], self._session.graph
        copies = [Copy(graph, handles, variable) for handles in copies_of(self.item, variable)]
        source = self._tf.compat.v1.placeholder(self._tf.as_dtype(variable.dtype))
        self._are_set[name] = copies[0].is_initialized()
        self._reads[name] = tuple(copy.read() for copy in copies)
        self._writes[name] = source, tuple(copy.write(source) for copy in copies)

    def _run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None) -> Any:
        return self._session.run(fetches, feeds, timeout_ms=int(self.timeout * 1e3))

    def initialise(self) -> None:
        """Run the initialisers."""
        names = [v.initializer for v in self.item.variables.values() if v.initializer is not None]
        names = [self.item.init_op] if self.item.init_op is not None else list(dict.fromkeys(names))
        if names:
            self._run(names)
        if self._are_set:
            self.unset = {name for name, is_set in self._run(self._are_set).items() if not is_set}

    def read(self) -> Iterator[tuple[str, list[Array]]]:
        """Yield every variable with the values of its copies."""
        values = self._run(self._reads) if self._reads else {}
        for name in sorted(values):
            yield name, [np.asarray(value) for value in values[name]]

    def write(self, values: Mapping[str, Any]) -> None:
        """Set variables in all their copies."""
        if values:
            feeds = {self._writes[name][0]: value for name, value in values.items()}
            self._run([self._writes[name][1] for name in values], feeds)

    def step(self, feeds: Mapping[Any, Any]) -> dict[str, Array]:
        """Train one step; return the declared outputs."""
        outputs, _ = self._run([self._outputs, list(self.item.targets)], feeds)
        return {name: np.asarray(value) for name, value in outputs.items()}

    def observe(self, feeds: Mapping[Any, Any], tensors: Sequence[str]) -> list[Array]:
        """Train one step; return the values that tensors of the graph had in it."""
        values, _ = self._run([list(tensors), list(self.item.targets)], feeds)
        return [np.asarray(value) for value in values]
