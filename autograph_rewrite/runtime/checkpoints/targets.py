"""What a checkpoint holds of a program: its variables by name, read at one moment and written back.

    session          the variables of the original graph, by their names there
    Keras model      weights, other variables, the optimizer's: by their paths
    anything that TensorFlow tracks (tf.Module, tf.train.Checkpoint)    by the way to them: `net/layers/0/w`

What a rewrite has added for each replica (the residuals of compressors) is this worker's alone.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.load.signature.keras_state import variables_of
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.checkpoints.deal import Extent
from autograph_rewrite.runtime.function.function import DistributedFunction
from autograph_rewrite.runtime.session.session import DistributedSession


class Target(Protocol):
    """The variables of a program."""

    @property
    def common(self) -> Mapping[str, Extent]:
        """Those that all workers have alike."""

    @property
    def own(self) -> Mapping[str, Extent]:
        """Those of this worker alone."""

    def snapshot(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Return values that no later step changes, by name."""

    def write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Give variables values."""


def target_of(given: Any) -> Target:
    """Return the variables of a session, a Keras model, or what TensorFlow tracks.

    Raises:
        GraphError: it has none that can be found.
    """
    if isinstance(given, DistributedSession):
        return SessionVariables(given)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(given, keras.Model):
        return _of_model(given)
    if not isinstance(given, tensorflow().__internal__.tracking.Trackable):
        raise GraphError(
            f"an object of type {type(given).__name__} has no variables that a checkpoint could hold",
            hint="give a session, a Keras model, a tf.Module, or tf.train.Checkpoint(model=..., step=...)",
        )
    return _tracked(given)


def average_variables(given: Any) -> None:
    """Let replicas meet that have trained by themselves since they were averaged (`local_sgd`).

    Args:
        given: as for `target_of`.
    """
    keras = sys.modules.get("keras")
    if isinstance(given, DistributedSession):
        given.average_variables()
    elif keras is not None and isinstance(given, keras.Model):
        from autograph_rewrite.runtime.keras.model import functions_of

        for function in functions_of(given):
            function.average_variables()
    else:
        for _, one in _objects(given):
            if isinstance(one, DistributedFunction):
                one.average_variables()


@dataclass(frozen=True)
class EagerVariables:
    """Variables of the eager runtime: a step gives one that is being held a new buffer, so holding is a snapshot."""

    variables: Mapping[str, Any]
    common: Mapping[str, Extent]
    own: Mapping[str, Extent]

    @classmethod
    def of(cls, common: Mapping[str, Any], own: Mapping[str, Any]) -> EagerVariables:
        """Make one of variables by name."""
        return cls({**common, **own}, _extents(common), _extents(own))

    def snapshot(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Return values that no later step changes, by name."""
        tf = tensorflow()
        with tf.device("CPU:0"):
            return {name: tf.identity(self.variables[name]) for name in names}

    def write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Give variables values."""
        for name, value in values.items():
            self.variables[name].assign(value)


class SessionVariables:
    """The variables of a session, whole, wherever they are.

    Args:
        session: the session.
    """

    def __init__(self, session: DistributedSession) -> None:
        self._session = session
        item = session.item
        first = item.report.first_replica if item.report is not None else 0
        count = item.report.plan.replicas_each if item.report is not None else 1
        self._replicas = {f"{name}/replica_{first + row}": (name, row) for name in item.state for row in range(count)}
        self.common = {name: _extent(v.shape, v.dtype) for name, v in session.whole_variables.readable.items()}
        self.own = {
            full: _extent(item.state[name].shape, item.state[name].dtype) for full, (name, _) in self._replicas.items()
        }

    def snapshot(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Return values that no later step changes, by name."""
        wanted = list(names)
        stacked = {self._replicas[name][0] for name in wanted if name in self._replicas}
        whole = list(self.common) if self._session.is_driven else [n for n in wanted if n in self.common]
        found = self._session.read_variables([*whole, *stacked])
        rows = {full: found[name][row] for full, (name, row) in self._replicas.items() if name in found}
        return {name: rows[name] if name in rows else found[name] for name in wanted}

    def write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Give variables values."""
        common = {name: value for name, value in values.items() if name in self.common}
        for name in self._session.item.state:
            rows = [values[full] for full, (of, _) in self._replicas.items() if of == name and full in values]
            if rows and len(rows) == sum(of == name for of, _ in self._replicas.values()):
                common[name] = np.stack(rows)
        self._session.write_variables(common)


def _of_model(model: Any) -> EagerVariables:
    """Return the variables of a Keras model; its optimizer makes its own at the first step, or here."""
    from autograph_rewrite.runtime.keras.model import functions_of

    common: dict[str, Any] = {}
    for variable in variables_of(model):
        common[_unique(variable.path, common)] = variable
    own = {name: v for function in functions_of(model) for name, v in _children(function.state)}
    return EagerVariables.of(common, own)


def _tracked(root: Any) -> EagerVariables:
    tf = tensorflow()
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for path, one in _objects(root):
        if isinstance(one, DistributedFunction):
            own |= {f"{path}/{name}" if path else name: variable for name, variable in _children(one.state)}
        if isinstance(one, tf.Variable):
            common[path or one.name.partition(":")[0]] = one
    return EagerVariables.of(common, own)


def _objects(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield what TensorFlow tracks from an object on, each with the way to it."""
    tf = tensorflow()
    seen = {id(root)}
    queue = deque([("", root)])
    while queue:
        path, one = queue.popleft()
        yield path, one
        if isinstance(one, tf.Variable):
            continue
        for name, child in sorted(tf.train.TrackableView.children(one).items()):
            if id(child) not in seen and not (isinstance(one, DistributedFunction) and name == "state"):
                seen.add(id(child))
                queue.append((f"{path}/{name}" if path else name, child))


def _children(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a module that holds them directly."""
    yield from tensorflow().train.TrackableView.children(module).items()


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name that is not taken: `w`, `w#2`, ..."""
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    return found


def _extents(variables: Mapping[str, Any]) -> dict[str, Extent]:
    tf = tensorflow()
    return {name: _extent(v.shape, tf.as_dtype(v.dtype).name) for name, v in variables.items()}


def _extent(shape: Iterable[int | None] | None, dtype: str) -> Extent:
    """Return the extent of a value; where the shape is open, that of something small, which is never cut."""
    known = tuple(shape) if shape is not None else (None,)
    if None in known:
        return Extent((), 1)
    sizes = tuple(size for size in known if size is not None)
    return Extent(sizes, prod(sizes) * max(tensorflow().as_dtype(dtype).size, 1))
