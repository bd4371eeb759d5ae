"""Find the variables of a program that a checkpoint holds, by name, read them at one moment, and write them back.

    session          the variables of the original graph, by their names there
    Keras model      weights, other variables, the optimizer's: by their paths; what else it tracks by the way to it
    anything that TensorFlow tracks (tf.Module, tf.train.Checkpoint)    by the way to them: `net/layers/0/w`

Variables that a rewrite has added for each replica (the residuals of compressors) belong to this worker alone.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.load.keras_library import is_model, optimizer_variables, path_of, variables_of
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine.session import DistributedSession
from autograph_rewrite.runtime.function.function import DistributedFunction


def target_of(given: Any, workers: int = 1) -> Target:
    """Return the variables of a session, a Keras model, or an object that TensorFlow tracks.

    Raises:
        GraphError: no variables can be found, or some state cannot be saved.
    """
    if isinstance(given, DistributedSession):
        return SessionTarget(given)
    if is_model(given):
        return _of_model(given, workers)
    if not _is_keras(given) and not isinstance(given, tensorflow().__internal__.tracking.Trackable):
        raise GraphError(
            f"an object of type {type(given).__name__} has no variables that a checkpoint could hold",
            hint="give a session, a Keras model, a tf.Module, or tf.train.Checkpoint(model=..., step=...)",
        )
    return _tracked(given, {}, {}, workers)


def average_variables(given: Any) -> None:
    """Average the variables of replicas that train by themselves (`local_sgd`)."""
    if isinstance(given, DistributedSession):
        given.average_variables()
    elif is_model(given):
        from autograph_rewrite.runtime.keras_model import average

        average(given)
    else:
        for _, one in _objects(given):
            if isinstance(one, DistributedFunction):
                one.average_variables()


class _TrackedTensor(NamedTuple):
    """One tensor of the state of an object that is no variable: a table's keys, an iterator's position."""

    saveable: Any
    spec: Any


@dataclass(frozen=True)
class EagerVariables:
    """Variables of the eager runtime: a step does not overwrite a value that is referenced, so that is a snapshot."""

    variables: Mapping[str, Any]
    """Variables, and parts of other state, by name."""
    common: Mapping[str, StoredShape]
    """Those with equal values on all workers."""
    own: Mapping[str, StoredShape]
    """Those of this worker alone."""
    ways: frozenset[str] = frozenset()
    """The paths of tracked objects: the program must have every value that was saved below one."""

    def holds(self, name: str) -> bool:
        """Return whether a name that the program lacks is below an object that it tracks."""
        steps = name.split("/")
        return any("/".join(steps[:count]) in self.ways for count in range(1, len(steps)))

    def snapshot(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Return values that no later step changes, by name."""
        tf = tensorflow()
        with tf.device("CPU:0"):
            given = {name: self.variables[name] for name in names}
            return {
                name: v.spec.tensor if isinstance(v, _TrackedTensor) else tf.identity(v) for name, v in given.items()
            }

    def write(self, values: Mapping[str, Any]) -> None:
        """Give variables values."""
        saveables = {}
        for name, value in values.items():
            one = self.variables[name]
            if isinstance(one, _TrackedTensor):
                saveables[id(one.saveable)] = one.saveable
            else:
                one.assign(value)
        tf = tensorflow()
        for saveable in saveables.values():
            saveable.restore([tf.convert_to_tensor(values[spec.name]) for spec in saveable.specs], None)


class SessionTarget:
    """The variables of a session, as full values, on whatever devices they are."""

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
        whole = list(self.common) if self._session.driven is not None else [n for n in wanted if n in self.common]
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

    def holds(self, name: str) -> bool:
        """Return False: a graph has all its variables from the start."""
        return False


Target = EagerVariables | SessionTarget
"""The variables of a program."""


def _of_model(model: Any, workers: int) -> EagerVariables:
    """Return the variables of a Keras model, none before it is built; build its optimizer if it is not."""
    from autograph_rewrite.runtime.keras_model import functions_of

    if not model.built:
        return EagerVariables({}, {}, {})
    named: dict[str, Any] = {}
    seeds = {id(variable) for variable in model.variables} - {id(variable) for variable in model.weights}
    variables = variables_of(model)  # it builds the optimizer
    optimizer: Any = getattr(model, "optimizer", None)
    state = {id(variable) for variable in optimizer_variables(optimizer)} if optimizer is not None else set()
    for variable in variables:
        if id(variable) in seeds:  # `_tracked` names them: their paths count the seeds that the process has made
            continue
        path = path_of(variable)
        if id(variable) in state:  # Keras' path depends on where the optimizer was built: alone, or in its first step
            path = f"{optimizer.name}/{path.removeprefix(f'{optimizer.name}/')}"
        named[_unique(path, named)] = variable
    own = {name: v for function in functions_of(model) for name, v in _children(function.state).items()}
    return _tracked(model, named, own, workers)


def _tracked(root: Any, named: Mapping[str, Any], own: Mapping[str, Any], workers: int) -> EagerVariables:
    """Return all state that an object tracks, directly or through other objects.

    Args:
        named: variables that have other names than their paths.
        own: variables of this worker alone, by name.

    Raises:
        GraphError: some of it cannot be saved.
    """
    tf = tensorflow()
    objects = list(_objects(root))
    common, own = dict(named), dict(own)
    known = {id(variable) for variable in named.values()}

    def add(name: str, variable: Any) -> None:
        if id(variable) not in known:
            known.add(id(variable))
            common[name] = variable

    for path, one in objects:
        if isinstance(one, DistributedFunction):
            own |= {_way(path, name): variable for name, variable in _children(one.state).items()}
        elif _is_variable(one):
            add(path or one.name.partition(":")[0], one)
        elif isinstance(one, tf.data.Iterator) and workers > 1:
            raise GraphError(
                f"'{path}' is an iterator over a dataset: each worker has its place in it, and a checkpoint holds one",
                hint="save how many batches were drawn, in `extra`, and skip as many; do not track the iterator",
            )
        else:
            common |= _parts(path, one)
    for path, one in reversed(objects):  # a layer's variable gets the layer's path, not the model's
        for at, variable in enumerate(_untracked(one)):
            add(_way(path, f"variables/{at}"), variable)
    for path, one in objects:
        for name, variable in _slots(path, one, common):
            add(name, variable)
    ways = frozenset(path for path, one in objects if path and not isinstance(one, DistributedFunction))
    return EagerVariables({**common, **own}, _extents(common), _extents(own), ways)


def _objects(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and all objects that TensorFlow tracks through it, each with its path.

    Objects that an optimizer tracks come last, so that a weight has the same path with its optimizer and without.
    """
    tf = tensorflow()
    seen = {id(root)}
    queue, of_optimizers = deque([("", root)]), deque[tuple[str, Any]]()
    while queue or of_optimizers:
        path, one = (queue or of_optimizers).popleft()
        yield path, one
        if _is_variable(one) or not isinstance(one, tf.__internal__.tracking.Trackable):
            continue
        later = of_optimizers if hasattr(type(one), "apply_gradients") else queue
        for name, child in sorted(_children(one).items()):
            is_left_out = isinstance(one, DistributedFunction) and name == "state"
            is_left_out |= isinstance(one, tf.train.Checkpoint) and name == "save_counter"  # counts TensorFlow's files
            if id(child) not in seen and not is_left_out:
                seen.add(id(child))
                later.append((_way(path, name), child))


def _is_variable(one: Any) -> bool:
    keras = sys.modules.get("keras")
    return isinstance(one, tensorflow().Variable) or (keras is not None and isinstance(one, keras.Variable))


def _is_keras(one: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(one, keras.Layer | keras.Metric | keras.random.SeedGenerator)


def _untracked(one: Any) -> Sequence[Any]:
    """Return the variables of a Keras object, also those that TensorFlow does not track: of seeds and metrics."""
    if not _is_keras(one):
        return ()
    keras = sys.modules["keras"]
    if isinstance(one, keras.random.SeedGenerator):
        return (one.state,)
    if isinstance(one, keras.Metric):
        return list(one.variables)
    of_metrics = (variable for metric in one._metrics for variable in metric.variables)  # without those of `compile`
    return [*variables_of(one), *of_metrics]


def _slots(path: str, one: Any, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the slot variables of a TensorFlow optimizer, under TensorFlow's names."""
    for slot in one.get_slot_names() if "get_slot_names" in dir(one) else ():
        for name, variable in list(variables.items()):
            with suppress(AttributeError, KeyError):  # a variable of another optimizer, or of none
                found = one.get_slot(variable, slot)
                if found is not None:
                    yield f"{name}/.OPTIMIZER_SLOT/{path}/{slot}", found


def _parts(path: str, one: Any) -> Mapping[str, _TrackedTensor]:
    """Return the state of an object that is no variable, in TensorFlow's form.

    Raises:
        GraphError: TensorFlow cannot save it.
    """
    tracking = tensorflow().__internal__.tracking
    if not isinstance(one, tracking.Trackable):
        return {}
    parts: dict[str, _TrackedTensor] = {}
    try:
        for attribute, made in tracking.saveable_objects_from_trackable(one).items():
            saveable = made(name=_way(path, attribute)) if callable(made) else made
            parts |= {spec.name: _TrackedTensor(saveable, spec) for spec in saveable.specs}
    except tensorflow().errors.OpError as error:
        raise GraphError(f"'{path}' ({type(one).__name__}) cannot be saved: {str(error).splitlines()[0]}") from None
    return parts


def _way(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _children(one: Any) -> Mapping[str, Any]:
    """Return what TensorFlow tracks of an object directly."""
    found: Mapping[str, Any] = tensorflow().train.TrackableView.children(one)
    return found


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name that is not taken: `w`, `w#2`, ..."""
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    return found


def _extents(variables: Mapping[str, Any]) -> dict[str, StoredShape]:
    return {
        name: _extent(None, v.spec.dtype) if isinstance(v, _TrackedTensor) else _extent(v.shape, v.dtype)
        for name, v in variables.items()
    }


def _extent(shape: Iterable[int | None] | None, dtype: Any) -> StoredShape:
    """Return shape and size of a value; for an open shape those of a small value, which is never cut."""
    known = tuple(shape) if shape is not None else (None,)
    if None in known:
        return StoredShape((), 1)
    sizes = tuple(size for size in known if size is not None)
    return StoredShape(sizes, prod(sizes) * max(tensorflow().as_dtype(dtype).size, 1))


# Which worker writes which part of which variable: contiguous shares of equal size.
#
#     w [1000, 64]  b [64]  m [1000, 64]          3 workers
#     worker 0   w 0:667        worker 1   w 667:1000, b, m 0:333        worker 2   m 333:1000
#
# All workers compute the same shares without communication: names are taken in order, and only the first dimension is
# cut.

WHOLE_BELOW = 1 << 16
"""Variables of fewer bytes are not cut."""


@dataclass(frozen=True)
class StoredShape:
    """The shape of a variable, and the bytes of its value."""

    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Piece:
    """Rows of a variable, from `rows[0]` to `rows[1]`; None if it is written whole."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @property
    def slice_spec(self) -> str:
        """The slice in the form of `SaveV2`: the full shape, then offset and length in each dimension."""
        if self.rows is None:
            return ""
        start, stop = self.rows
        ranges = [f"{start},{stop - start}", *("-" for _ in self.shape[1:])]
        return f"{' '.join(map(str, self.shape))} {':'.join(ranges)}"


def deal(extents: Mapping[str, StoredShape], workers: int) -> list[list[Piece]]:
    """Return the pieces that each worker writes; together they contain every variable once."""
    shares: list[list[Piece]] = [[] for _ in range(workers)]
    ends = bounds(sum(extent.size for extent in extents.values()), workers)[1:]
    offset = 0
    for name in sorted(extents):
        extent = extents[name]
        if extent.size < WHOLE_BELOW or not extent.shape:
            owner = min(bisect_right(ends, offset), workers - 1)
            shares[owner].append(Piece(name, extent.shape))
        else:
            for owner, rows in _rows(extent, offset, ends):
                shares[owner].append(Piece(name, extent.shape, rows if rows != (0, extent.shape[0]) else None))
        offset += extent.size
    return shares


def _rows(extent: StoredShape, offset: int, ends: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield workers with their rows of a variable that begins `offset` bytes after the first variable."""
    rows, start = extent.shape[0], 0
    for worker, end in enumerate(ends):
        stop = rows if end == ends[-1] else min(rows, max(start, round((end - offset) * rows / extent.size)))
        if stop > start:
            yield worker, (start, stop)
        start = stop
