"""Mirror the user's variables on the other devices, and keep the copies in sync (`MirrorGuard`).

user's tf.Variable  @ device 0  ── the truth: checkpoints, callbacks and model.save see this one
mirror              @ device 1  ── updated by every step as well; refreshed when somebody else wrote the variable
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types.dtypes import BOOL, INEXACT, INTEGER
from autograph_rewrite.plan.parts.residence import shard_name
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine import variable_copies
from autograph_rewrite.runtime.engine.native import Reader
from autograph_rewrite.runtime.function.served_variables import Held, Served, ValueSource
from autograph_rewrite.runtime.job.digests import adopt_from_chief
from autograph_rewrite.training_graph import Shards, Variable

Array = np.ndarray[Any, Any]


class Mirrored:
    """One variable of the user, its copies by device, and the value that it had after the last step.

    Attributes:
        alone: whether each replica trains its copy by itself (`local_sgd`), so that copies differ, also after errors.
    """

    def __init__(self, handle: Any, dtype: str, shape: Sequence[int | None] | None) -> None:
        self._tf = tensorflow()
        self.handle = handle
        self.dtype = self._tf.as_dtype(dtype)
        self.copies: dict[Any, Any] = {}  # by device
        self.seen: Any = None
        self.served: Served | None = None  # where its value may be on a server
        self.alone = False
        self.adopts = True  # in a job: it has not yet taken the value of worker 0
        self.shape = self._tf.TensorShape(shape)
        self.parts = 1  # number of tensors in its value after a step
        # Scalars of any type can be compared, strings cannot be watched.
        self.watchable = self.dtype.is_numpy_compatible and self.dtype != self._tf.string and "CPU" in handle.device

    def copy_on(self, device: str) -> Any:
        """Return the handle of the copy on a device; make the copy if there is none."""
        if device not in self.copies:
            with self._tf.init_scope(), self._tf.device(device):
                self.copies[device] = self._tf.Variable(
                    self.value(), trainable=False, dtype=self.dtype, shape=self.shape, name="mirror"
                )  # it shares the memory of the original until one of the two is written
        return self.copies[device].handle

    def value(self) -> Any:
        """Return the value of the user's variable."""
        if self.served is not None:
            self.served.here()
        return self._tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def write(self, value: Any) -> None:
        """Write the user's variable."""
        self.seen = None
        if self.served is not None:
            self.served.source, self.served.is_empty = None, False
        if self.dtype != self._tf.string:
            with self._tf.device(self.handle.device):
                self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=self._tf.constant(value, self.dtype))

    def leave_to(self, source: ValueSource, *, free: bool) -> None:
        """Let `source` hold the value from now on; it is fetched when Python asks.

        Args:
            free: whether to free its memory here; no code but the variable may hold the handle.
        """
        assert self.served is not None
        self.served.source = source
        if free and not self.served.is_empty:
            with self._tf.device(self.handle.device):
                self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=self._tf.zeros([0], self.dtype))
            self.served.is_empty = True

    def held(self) -> list[Any]:
        """Return the values of the user's variable and of each copy."""
        return [self.value(), *(copy.read_value() for copy in self.copies.values())]

    def refresh(self, value: Any) -> list[Any]:
        """Write all copies; return the ops, which exist while a function is traced."""
        ops = []
        for device, copy in self.copies.items():
            with self._tf.device(device):
                ops.append(self._tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
        return ops

    def after(self, values: Sequence[Any]) -> None:
        """Store the value that the variable has after a step."""
        (self.seen,) = values


class Mirrors:
    """The mirrored variables of one distributed function or model, shared by all its traces.

    Attributes:
        state: a tf.Module with the variables that rewriting has added.
        held: counts the references to handles of variables.
        holder: the guard of the step that has run last.
    """

    def __init__(self) -> None:
        self._known: dict[int, Mirrored] = {}
        self._cut: dict[tuple[int, Shards], ShardedCopies] = {}
        self.state = tensorflow().Module(name="state")
        self.held = Held()
        self.holder: MirrorGuard | None = None

    def of(self, handle: Any, dtype: str, shape: Sequence[int | None] | None) -> Mirrored:
        """Return the mirrored variable with this handle; make it if there is none."""
        if id(handle) not in self._known:
            self._known[id(handle)] = Mirrored(handle, dtype, shape)
            self.held.add(self._known[id(handle)])
        return self._known[id(handle)]

    def in_shards(self, handle: Any, variable: Variable, shards: Shards) -> ShardedCopies:
        """Return the variable with this handle, cut into these shards."""
        key = id(handle), replace(shards, handles=(), copies=())
        if key not in self._cut:
            self._cut[key] = ShardedCopies(handle, variable.dtype, variable.shape, shards)
        return self._cut[key]


def adopt(variables: Sequence[Mirrored], member: Membership, seconds: float) -> None:
    """Give variables the values of worker 0; all workers call this together.

    Raises:
        ClusterError: a worker is missing.
    """
    values = (np.asarray(variable.value()) for variable in variables)
    for variable, value in zip(variables, adopt_from_chief(member, seconds, values), strict=True):
        variable.write(value)
        variable.adopts = False


def is_equal(old: Any, new: Any) -> bool:
    """Return whether two tensors have the same contents, bit by bit."""
    a, b = np.asarray(old), np.asarray(new)
    return a.shape == b.shape and np.array_equal(_bits(a), _bits(b))


def _bits(array: Array) -> Array:
    return array if array.dtype == object else np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# A user's variable whose value is kept in shards by a distributed function.
#
#     user's tf.Variable  ── the truth: checkpoints, callbacks and model.save see this one
#         │ cut, when somebody wrote it          ▲ joined, after every step, also one that failed
#     w/part_0 @ device 0, w/part_1 @ device 1 ──┘
#
# A write in between is noticed as for mirrors, by the buffer that the variable has.


class ShardedCopies(Mirrored):
    """One variable of the user, and the copies of its shards, by their devices."""

    def __init__(self, handle: Any, dtype: str, shape: Sequence[int | None] | None, shards: Shards) -> None:
        super().__init__(handle, dtype, shape)
        self.shards, self.parts = shards, shards.count

    def copy_at(self, places: tuple[str, ...]) -> list[Any]:
        """Return the handles of the shards on some devices; make the shards if there are none."""
        if places not in self.copies:
            made: list[Any] = []
            with self._tf.init_scope():
                for part, place in zip(variable_copies.cut(self.shards, self.value()), places, strict=True):
                    with self._tf.device(place):
                        name = shard_name("shard", len(made))
                        made.append(self._tf.Variable(part, trainable=False, dtype=self.dtype, name=name))
            self.copies[places] = tuple(made)
        return [shard.handle for shard in self.copies[places]]

    def held(self) -> list[Any]:
        """Return the values of the first replica's shards."""
        return [shard.read_value() for shard in next(iter(self.copies.values()))]

    def refresh(self, value: Any) -> list[Any]:
        """Write the shards of all copies; return the ops, which exist while a function is traced."""
        ops = []
        parts = variable_copies.cut(self.shards, value)
        for copy in self.copies.values():
            for variable, part in zip(copy, parts, strict=True):
                with self._tf.device(variable.handle.device):
                    ops.append(self._tf.raw_ops.AssignVariableOp(resource=variable.handle, value=part))
        return ops

    def after(self, values: Sequence[Any]) -> None:
        """Write the user's variable from the values of its shards after a step."""
        self.seen = self.join(values)[0]

    def join(self, pieces: Sequence[Any]) -> tuple[Any, Any]:
        """Write the user's variable from its shards; return the value, and the op, which exists while one is traced."""
        with self._tf.device(self.handle.device):
            whole = variable_copies.join(self.shards, pieces)
            return whole, self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=whole)


# Finds the variables that code other than the step has written since the last step, and refreshes their mirrors.
#
#     small variables    by their contents: those of one type and shape are read as the rows of one tensor
#     large ones         by their buffers
#
# TensorFlow's variables are copy-on-write: while the guard holds the tensor that a variable had after the last step,
# any other write must give the variable a new buffer. So a variable that still has the held buffer is unchanged. Before
# a step the guard releases its tensors, so that updates happen in place. For a few kilobytes, a copy and a comparison
# are faster than tensor objects and a look at their buffers.

SMALL = 1 << 14
"""The most bytes of a small variable."""
_STACKED = INEXACT | INTEGER | {BOOL}
"""Types that TensorFlow stacks as rows, and numpy compares."""


class MirrorGuard:
    """Refreshes the mirrors of the variables of one step when they were written outside of it, and returns these.

    Args:
        mirrored: variables with mirrors, and variables whose writes are compared between workers.
    """

    def __init__(self, mirrored: Iterable[Mirrored], sharded: Iterable[ShardedCopies], mirrors: Mirrors) -> None:
        self._mirrors, whole, cut = mirrors, list(mirrored), list(sharded)
        self._rows = [StackRows(stack) for stack in stacks_of(whole)]
        small = {id(variable) for rows in self._rows for variable in rows.variables}
        self.variables: tuple[Mirrored, ...] = (*whole, *cut)
        self.single = tuple(v for v in whole if v.watchable and id(v) not in small)
        self._told: tuple[Mirrored, ...] = (*self.single, *cut)
        self._watched = tuple(v for v in self._told if v.watchable)
        self._unwatched = tuple(v for v in self.variables if not v.watchable)
        self._read = self._reader()

    def _reader(self) -> Reader | None:
        """Return a reader of the watched variables, those of stacks last."""
        variables = [*self._watched, *(v for rows in self._rows for v in rows.variables)]
        if not variables:
            return None
        positions = iter(range(len(self._watched), len(variables)))
        stacks = [[next(positions) for _ in rows.variables] for rows in self._rows]
        return Reader([v.handle for v in variables], [v.dtype.as_datatype_enum for v in variables], stacks)

    @property
    def stacks(self) -> list[list[tuple[Mirrored, ...]]]:
        """The small variables, grouped by type and shape, in lists by device."""
        stacks = [rows.variables for rows in self._rows]
        return [list(those) for _, those in groupby(stacks, key=lambda one: one[0].handle.device)]

    def before(self) -> list[tuple[Mirrored, Any]]:
        """Refresh and return the variables that were written since the last step; release all held values."""
        written: list[tuple[Mirrored, Any]] = []
        if self._read is not None:
            self._take_over()
            held, values = [mirrored.seen for mirrored in self._watched], self._read()
            now, stacks = values[: len(held)], values[len(held) :]
            kept = are_same(held, now)
            for mirrored in self._watched:
                mirrored.seen = None
            for index in (i for i, same in enumerate(kept) if not same):
                one, seen = self._watched[index], held[index]
                if seen is None or not is_equal(seen, now[index]):
                    one.refresh(now[index])
                    written.append((one, now[index]))
            for rows, stack in zip(self._rows, stacks, strict=True):
                for small in rows.changed(stack):
                    value = small.value()
                    small.refresh(value)
                    written.append((small, value))
                rows.forget()
        for mirrored in self._unwatched:
            value = mirrored.value()
            if not mirrored.alone or mirrored.seen is None or not is_equal(mirrored.seen, value):
                mirrored.refresh(value)
        return written

    def _take_over(self) -> None:
        """Take the last known values of the variables from the guard of the step that ran last."""
        if self._mirrors.holder is self:
            return
        if self._mirrors.holder is not None:
            self._mirrors.holder.give()
        self._mirrors.holder = self
        for rows in self._rows:
            rows.take()

    def give(self) -> None:
        """Store the value of each stacked variable in the variable."""
        for rows in self._rows:
            rows.give()

    def after(self, values: Sequence[Any]) -> None:
        """Take the values that the variables have after a step.

        Args:
            values: of the variables that are read one by one, of shards, and of the stacks.
        """
        rest = iter(values)
        for variable in self._told:
            variable.after([next(rest) for _ in range(variable.parts)])
        for rows, stack in zip(self._rows, rest, strict=True):
            rows.after(stack)
        self._know(variable for variable in self._unwatched if variable.alone)

    def after_in_graph(self, values: Sequence[Any]) -> list[Any]:
        """Write the user's variables from their shards, in the function that is being traced; return the ops."""
        rest = iter(values)
        told = [(variable, [next(rest) for _ in range(variable.parts)]) for variable in self._told]
        return [variable.join(pieces)[1] for variable, pieces in told if isinstance(variable, ShardedCopies)]

    def failed(self) -> None:
        """Keep the updates of a failed step: in shards, and in the copies that replicas train by themselves."""
        for variable in self.variables:
            if isinstance(variable, ShardedCopies):
                variable.join(variable.held())
            variable.seen = None
        self._know(variable for variable in self.variables if variable.alone)

    @staticmethod
    def _know(variables: Iterable[Mirrored]) -> None:
        for variable in variables:
            variable.seen = variable.value()

    def in_graph(self) -> list[Any]:
        """Copy every variable to its mirrors, in the function that is being traced; return the ops."""
        return [op for copied in self.variables if copied.copies for op in copied.refresh(copied.value())]


def are_same(old: Sequence[Any], new: Sequence[Any]) -> list[bool]:
    """Return for each pair of tensors whether they are one buffer.

    Args:
        old: tensors, or None for unknown values.
    """
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(old, new, strict=True)]
    # The quick test first, as there are hundreds of pairs in every step: two held buffers overlap only if they are one.
    return [np.may_share_memory(a, b) or is_same(a, b) for a, b in pairs]


def is_same(old: Any, new: Any) -> bool:
    """Return whether two tensors are one buffer; scalars, which numpy copies, are compared bit by bit.

    False for strings, which numpy converts to arrays of pointers.
    """
    a, b = np.asarray(old), np.asarray(new)
    if a.shape != b.shape or a.dtype == object:
        return False
    if a.ndim == 0 or a.size == 0:
        return a.tobytes() == b.tobytes()
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def stacks_of(variables: Iterable[Mirrored]) -> list[list[Mirrored]]:
    """Return the small variables, grouped by type, shape and device; the groups of a device are adjacent."""
    found: dict[tuple[str, str, tuple[int, ...]], list[Mirrored]] = {}
    for variable in variables:
        shape, dtype = variable.shape, variable.dtype
        if not shape.is_fully_defined() or not variable.watchable or dtype.as_datatype_enum not in _STACKED:
            continue
        if shape.num_elements() * dtype.size <= SMALL:
            found.setdefault((variable.handle.device, dtype.name, tuple(shape.as_list())), []).append(variable)
    return [found[key] for key in sorted(found)]


class StackRows:
    """The values of the variables of one stack after the last step."""

    def __init__(self, variables: Sequence[Mirrored]) -> None:
        self.variables = tuple(variables)
        self._seen: Array | None = None

    def take(self) -> None:
        """Take the last known value from each variable: another step has run last."""
        rows = [variable.seen for variable in self.variables]
        self._seen = np.stack([np.asarray(row) for row in rows]) if all(row is not None for row in rows) else None

    def give(self) -> None:
        """Store each value in its variable: another step runs next."""
        if self._seen is not None:
            for variable, value in zip(self.variables, self._seen, strict=True):
                variable.seen = value

    def forget(self) -> None:
        """Drop the values: a step begins, and may fail."""
        self._seen = None

    def after(self, values: Any) -> None:
        """Store the values after a step.

        Args:
            values: tensor, one row for each variable.
        """
        self._seen = np.asarray(values)

    def changed(self, now: Any) -> list[Mirrored]:
        """Return the variables that were written since the last step.

        Args:
            now: tensor of their present values, one row for each variable.
        """
        seen, found = self._seen, np.asarray(now)
        if seen is not None and is_equal(seen, found):
            return []
        known = [variable.seen for variable in self.variables] if seen is None else seen
        pairs = zip(self.variables, known, found, strict=True)
        return [variable for variable, old, new in pairs if old is None or not is_equal(old, new)]


# Auxiliary variables of a rewritten function: created here, one per replica, and captured by every trace.
#
#     step = ar.distribute(train_step, {..., compressor: topk}, spec)
#     step.state                                  a tf.Module: "w/autograph_residual/replica_0", ...
#     tf.train.Checkpoint(model=model, step=step) saves and restores them
#
# They are made when the function is first traced; a checkpoint that was restored before then sets their values.


def added_to(state: Any, variable: Variable, replica: int, device: str) -> Any:
    """Return one replica's variable in a tf.Module, new if there is none; replicas count over all processes."""
    tf, name = tensorflow(), f"{variable.name}/replica_{replica}"
    found = getattr(state, name, None)
    if found is None:
        with tf.init_scope(), tf.device(device):
            zeros = tf.zeros(variable.shape, variable.dtype)
            found = tf.Variable(zeros, trainable=False, name=variable.name)
        setattr(state, name, found)
    if (tuple(found.shape), found.dtype.name) != (variable.shape, variable.dtype):
        raise GraphError(
            f"'{variable.name}' is {found.dtype.name}{list(found.shape)} in one trace of the step and "
            f"{variable.dtype}{list(variable.shape or ())} in another",
            hint="trace the step once: pass specs to ar.distribute",
        )
    return found


@functools.cache
def trackable(cls: Any) -> Any:
    """Return a subclass that `tf.train.Checkpoint` takes; `_track_trackable` adds the objects to save."""
    base = tensorflow().__internal__.tracking.Trackable
    return type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
