"""Let a program with its own training loop take part in an elastic job: take snapshots between steps, and resume.

    ar.shard_dataset     iterations of 6, 6 and 3 batches were drawn: they are drawn and dropped, and the third goes on
    ar.on_resize(f)      f(15) is called: the program begins at step 15 by itself

A step is one call of the first distributed function (of several that alternate, as those of two optimizers), or one
run of a session that updates. Snapshots are taken before a step, when everything of the last step is done.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from types import FunctionType
from typing import Any

import numpy as np

from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ClusterError, ConfigError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.job_memory import JobMemory, Snapshot
from autograph_rewrite.runtime.job.stop import Stop, is_wanted
from autograph_rewrite.training_graph import TrainingGraph

NAME = "loop"
Read = Callable[[], Mapping[str, Any]]
Failed = Callable[[], ClusterError | None]


class OwnLoop:
    """Counts the steps and batches of this process's loop, and keeps its snapshots.

    Attributes:
        every: how many steps there are from one snapshot to the next.
    """

    def __init__(self, memory: JobMemory) -> None:
        self.every = memory.every(Config().snapshot_steps)
        self._memory = memory
        self._found = memory.load(NAME)
        position = self._found.position if self._found is not None else {}
        self._done: int = position.get("done", 0)
        self._dropped: list[list[int]] = position.get("drawn", [])
        self._drawn: list[list[int]] = []
        self._drawn_by_then: list[list[int]] = []
        self._reads: dict[str, Read] = {}
        self._numbers = count(1)
        self._is_led = self._has_stepped = False
        self._last = self._done

    @classmethod
    @functools.cache
    def here(cls) -> OwnLoop | None:
        """Return the loop of this process; None where the job is not elastic."""
        memory = JobMemory.here()
        return cls(memory) if memory is not None else None

    def set_every(self, steps: int) -> None:
        """Take snapshots so often that at most `steps` steps can be lost."""
        self.every = self._memory.every(steps)

    def unique(self, name: str) -> str:
        """Return a name, made unique among the functions and sessions of this process by a number."""
        number = next(self._numbers)
        return f"'{name}' ({number})" if number > 1 else f"'{name}'"

    def on_resize(self, function: Callable[[int], None]) -> None:
        """Call `function` with the number of steps that are done, if it is not 0."""
        self._is_led = True
        if self._done:
            function(self._done)

    def batches(self, dataset: Any, *, ends: bool, failed: Failed | None = None) -> Batches:
        """Return a dataset that resumes at the batch where the last snapshot was taken.

        Args:
            ends: whether the dataset ends. For an endless one the program must count its steps (`on_resize`).
            failed: returns the error of a comparison of batches, of which TensorFlow keeps only the text.
        """
        self._is_led = self._is_led or ends
        self._drawn.append([])
        return Batches(dataset, self, len(self._drawn) - 1, failed)

    def iterate(self, dataset: Any, number: int) -> Iterator[Any]:
        """Yield the batches of one iteration."""
        mine = self._drawn[number]
        before = self._dropped[number] if number < len(self._dropped) else []
        mine.append(0)
        iteration = len(mine) - 1
        dropped = before[iteration] if iteration < len(before) else 0
        is_over = iteration < len(before) - 1  # a later one had begun
        if is_over and not dropped:
            return
        for batch in dataset:
            mine[iteration] += 1
            if mine[iteration] > dropped:
                yield batch
            elif mine[iteration] == dropped and is_over:
                return

    def before(self, who: str, read: Read) -> None:
        """Before a step: take a snapshot if one is due, and then let others join if they want to.

        Raises:
            ConfigError: nothing leads the program back to the step of a snapshot.
        """
        if not self._is_led:
            raise ConfigError(
                f"the loop around {who} is the program's own, and an elastic job could not go on in it",
                hint="take all data from ar.shard_dataset, which have to end; or say ar.on_resize(f), which is told "
                "how many steps are done",
            )
        self._reads.setdefault(who, read)
        if self._is_first(who) and self._has_stepped and self._done - self._last >= self.every:
            self._keep()
            if self._memory.rank == 0 and self._memory.lets_join:
                self._memory.wait_to_join()

    def after(self, who: str) -> None:
        """Count a step."""
        if not self._is_first(who):
            return
        self._done += 1
        self._drawn_by_then = [list(counts) for counts in self._drawn]
        if not self._has_stepped:
            self._has_stepped = True
            self._memory.did_step()

    def values(self, who: str, names: Iterable[str]) -> dict[str, Array]:
        """Return the values of those variables that the last snapshot of an earlier generation has."""
        if self._found is None:
            return {}
        numbers = self._found.position["variables"].get(who, {})
        return {name: self._found.arrays[numbers[name]] for name in names if name in numbers}

    def known(self, who: str) -> list[str]:
        """Return the names of the variables that the last snapshot has."""
        return list(self._found.position["variables"].get(who, {})) if self._found is not None else []

    def _is_first(self, who: str) -> bool:
        return who == next(iter(self._reads))

    def save(self) -> str | None:
        """Take a snapshot after the last step, as the job ends; return its description, None before the first step.

        All workers call it after the same step.
        """
        if not self._has_stepped:
            return None
        if self._done > self._last:
            self._keep()
        return f"a snapshot of step {self._done}"

    def _keep(self) -> None:
        """Let worker 0 take a snapshot; all workers have the same values, and all read them."""
        self._last = self._done
        values = {who: read() for who, read in self._reads.items()}
        if self._memory.rank:
            return
        arrays: list[Array] = []
        numbers: dict[str, dict[str, int]] = {}
        for who, found in values.items():
            numbers[who] = {name: len(arrays) + at for at, name in enumerate(found)}
            arrays += [np.asarray(value) for value in found.values()]
        position = {"done": self._done, "drawn": self._drawn_by_then, "variables": numbers}
        self._memory.save(NAME, Snapshot(position, arrays), self._done)


class Batches:
    """The batches of a worker's part of a dataset, from the last snapshot on."""

    def __init__(self, dataset: Any, loop: OwnLoop, number: int, failed: Failed | None = None) -> None:
        self._dataset, self._loop, self._number = dataset, loop, number
        self._failed = failed

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loop.iterate(self._dataset, self._number)
        except tensorflow().errors.OpError as error:
            problem = self._failed() if self._failed is not None else None
            if problem is None:
                raise
            raise problem from error  # it names the lost workers, without which the job goes on


def keep_steps(steps: int | None) -> None:
    """Let the loop of this process, if its job is elastic, take snapshots as a configuration says.

    Args:
        steps: `snapshot_steps` of the configuration; None: as before.
    """
    loop = OwnLoop.here()
    if loop is not None and steps is not None:
        loop.set_every(steps)


# The steps of a distributed function in an elastic job: save and restore its variables.


class FunctionSteps:
    """Observes the steps of one distributed function, and restores its variables."""

    def __init__(self, loop: OwnLoop, name: str) -> None:
        self._tf = tensorflow()
        self._loop, self._name = loop, loop.unique(name)
        self._handles: dict[str, tuple[Any, Any]] = {}

    def before(self, item: TrainingGraph) -> None:
        """Before a step: restore new variables from the snapshot, and take a snapshot if one is due.

        Raises:
            ConfigError: nothing leads the program back to the step of a snapshot.
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


# The state of callbacks as plain data: numbers, texts, arrays and names of functions. Other attributes are not kept.
#
# EarlyStopping   wait 2, best 0.31, best_weights [w]   ->   {"wait": 2, "best": 0.31, "best_weights": {"list": ...}}

Array = np.ndarray[Any, Any]

_ITS_OWN = ("BackupAndRestore", "CSVLogger", "TensorBoard")
"""Callbacks that keep their state in files."""


class _NotPlainError(Exception):
    """Raised for a value that is not plain data."""


def state_of(callback: Any, arrays: list[Array]) -> dict[str, Any]:
    """Return the attributes of a callback that are plain data.

    Args:
        arrays: gets the arrays of the attributes appended.
    """
    found: dict[str, Any] = {}
    if any(kind.__name__ in _ITS_OWN for kind in type(callback).__mro__):
        return found
    for name, value in vars(callback).items():
        own: list[Array] = []
        try:
            found[name] = _plain(value, own, len(arrays))
        except _NotPlainError:
            continue
        arrays += own
    return found


def set_state(callback: Any, state: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    """Restore the attributes of a callback from its state."""
    for name, value in state.items():
        setattr(callback, name, _back(value, arrays))


def _plain(value: Any, arrays: list[Array], first: int) -> Any:
    """Return a value as plain data; append its arrays to `arrays`, and write their numbers, from `first` on."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        arrays.append(np.asarray(value))
        return {"array": first + len(arrays) - 1, "scalar": isinstance(value, np.generic)}
    if isinstance(value, FunctionType) and _named(value.__module__, value.__qualname__) is value:
        return {"function": [value.__module__, value.__qualname__]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(element, arrays, first) for element in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _plain(element, arrays, first) for key, element in value.items()}}
    raise _NotPlainError


def _named(module: str, name: str) -> Any:
    """Return a function of an imported module, as `keras.ops.less`; None if there is none of that name."""
    return getattr(sys.modules.get(module), name, None)


def _back(value: Any, arrays: Sequence[Array]) -> Any:
    """Return the value of which `_plain` made this data."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]]
        return array[()] if value["scalar"] else array.copy()
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {key: _back(element, arrays) for key, element in inner.items()}
    if kind == "function":
        return _named(*inner)
    elements = [_back(element, arrays) for element in inner]
    return tuple(elements) if kind == "tuple" else elements


# An elastic job that is asked to end takes a snapshot after its last step.


def kept_loop() -> OwnLoop | None:
    """Return the loop of this process, and let it take a snapshot at a stop; None where the job is not elastic."""
    loop = OwnLoop.here()
    if loop is not None and is_wanted():
        _keep_at_the_end(loop)
    return loop


@functools.cache
def _keep_at_the_end(loop: OwnLoop) -> None:
    Stop.here().add(loop.save)
