"""Mirrored copies of the user's variables on the other devices, kept in sync (`guard`).

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
        alone: each replica trains its copy by itself (`local_sgd`), so the copies differ, after a failed step, too.
    """

    def __init__(self, handle: Any, dtype: str, shape: Sequence[int | None] | None) -> None:
        self._tf = tensorflow()
        self.handle = handle
        self.dtype = self._tf.as_dtype(dtype)
        self.copies: dict[str, Any] = {}
        self.seen: Any = None
        self.served: Served | None = None  # where its value may be on a server
        self.alone = False
        self.adopts = True  # in a job of several processes: what it holds is still this one's own
        self.shape = self._tf.TensorShape(shape)
        self.parts = 1  # tensors that tell its value after a step
        # Scalars of any type can be compared, strings cannot be watched.
        self.watchable = self.dtype.is_numpy_compatible and self.dtype != self._tf.string and "CPU" in handle.device

    def copy_on(self, device: str) -> Any:
        """Return the handle of the copy on a device, making it if there is none."""
        if device not in self.copies:
            with self._tf.init_scope(), self._tf.device(device):
                self.copies[device] = self._tf.Variable(
                    self.value(), trainable=False, dtype=self.dtype, shape=self.shape, name="mirror"
                )  # it shares the memory of the original until one of the two is written
        return self.copies[device].handle

    def value(self) -> Any:
        """Return what the user's variable holds."""
        if self.served is not None:
            self.served.here()
        return self._tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def write(self, value: Any) -> None:
        """Give the user's variable a value."""
        self.seen = None
        if self.served is not None:
            self.served.source, self.served.is_empty = None, False
        if self.dtype != self._tf.string:
            with self._tf.device(self.handle.device):
                self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=self._tf.constant(value, self.dtype))

    def leave_to(self, source: ValueSource, *, free: bool) -> None:
        """Let somebody else have the value of a variable that is fetched when Python asks.

        Args:
            free: give back its memory here; nobody but the variable may hold the handle.
        """
        assert self.served is not None
        self.served.source = source
        if free and not self.served.is_empty:
            with self._tf.device(self.handle.device):
                self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=self._tf.zeros([0], self.dtype))
            self.served.is_empty = True

    def held(self) -> list[Any]:
        """Return what the user's variable and each copy hold."""
        return [self.value(), *(copy.read_value() for copy in self.copies.values())]

    def refresh(self, value: Any) -> list[Any]:
        """Give all copies a value; return the ops, which exist while a function is traced."""
        ops = []
        for device, copy in self.copies.items():
            with self._tf.device(device):
                ops.append(self._tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
        return ops

    def after(self, values: Sequence[Any]) -> None:
        """Keep the value that the variable has after a step."""
        (self.seen,) = values


class Mirrors:
    """The mirrored variables of one distributed function or model, shared by all its traces.

    Attributes:
        extra: the variables that rewriting added to it.
        held: what holds the handles of variables.
        holder: what has run the last step.
    """

    def __init__(self) -> None:
        self._known: dict[int, Mirrored] = {}
        self._cut: dict[tuple[int, Shards], ShardedCopies] = {}
        self.extra = ExtraState()
        self.held = Held()
        self.holder: MirrorGuard | None = None

    def of(self, handle: Any, dtype: str, shape: Sequence[int | None] | None) -> Mirrored:
        """Return what is known of the variable with this handle."""
        if id(handle) not in self._known:
            self._known[id(handle)] = Mirrored(handle, dtype, shape)
            self.held.add(self._known[id(handle)])
        return self._known[id(handle)]

    def in_shards(self, handle: Any, variable: Variable, shards: Shards) -> ShardedCopies:
        """Return the variable with this handle as it is cut into shards."""
        key = id(handle), replace(shards, handles=(), copies=())
        if key not in self._cut:
            self._cut[key] = ShardedCopies(handle, variable.dtype, variable.shape, shards)
        return self._cut[key]


def adopt(variables: Sequence[Mirrored], member: Membership, seconds: float) -> None:
    """Give variables the values that worker 0 has of them; all workers call this together.

    Raises:
        ClusterError: somebody is missing.
    """
    values = [np.asarray(variable.value()) for variable in variables]
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
# Who wrote it meanwhile is found as for mirrors: by whose buffer it holds.


class ShardedCopies:
    """One variable, and the copies of its shards.

    Attributes:
        seen: the value that the user's variable got after the last step.
        parts: tensors that tell its value after a step.
        copies: of the shards, by where they are.
    """

    def __init__(self, handle: Any, dtype: str, shape: Sequence[int | None] | None, shards: Shards) -> None:
        self._tf = tensorflow()
        self.handle = handle
        self.dtype = self._tf.as_dtype(dtype)
        self.shards = shards
        self.seen: Any = None
        self.alone = False  # copies of shards are equal
        self.parts = shards.count
        self.watchable = bool(shape) and self.dtype.is_numpy_compatible and "CPU" in handle.device
        self.watchable = self.watchable and self.dtype != self._tf.string
        self.copies: dict[tuple[str, ...], tuple[Any, ...]] = {}

    def copy_at(self, places: tuple[str, ...]) -> list[Any]:
        """Return the handles of the shards that are on some devices, making them if there are none."""
        if places not in self.copies:
            made: list[Any] = []
            with self._tf.init_scope():
                for part, place in zip(variable_copies.cut(self.shards, self.value()), places, strict=True):
                    with self._tf.device(place):
                        name = shard_name("shard", len(made))
                        made.append(self._tf.Variable(part, trainable=False, dtype=self.dtype, name=name))
            self.copies[places] = tuple(made)
        return [shard.handle for shard in self.copies[places]]

    def value(self) -> Any:
        """Return what the user's variable holds."""
        return self._tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def held(self) -> list[Any]:
        """Return what the shards hold that the first replica uses."""
        return [shard.read_value() for shard in next(iter(self.copies.values()))]

    def refresh(self, value: Any) -> list[Any]:
        """Give the shards of all copies a value; return the ops, which exist while a function is traced."""
        ops = []
        parts = variable_copies.cut(self.shards, value)
        for copy in self.copies.values():
            for variable, part in zip(copy, parts, strict=True):
                with self._tf.device(variable.handle.device):
                    ops.append(self._tf.raw_ops.AssignVariableOp(resource=variable.handle, value=part))
        return ops

    def after(self, values: Sequence[Any]) -> None:
        """Give the user's variable what its shards hold after a step."""
        self.seen = self.join(values)[0]

    def join(self, pieces: Sequence[Any]) -> tuple[Any, Any]:
        """Give the user's variable what its shards hold; return that, and the op, which exists while one is traced."""
        with self._tf.device(self.handle.device):
            whole = variable_copies.join(self.shards, pieces)
            return whole, self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=whole)


# Finds what somebody else than the step has written since the last one, and refreshes the mirrors of it.
#
#     small variables    by their contents: those of one type and shape are read as the rows of one tensor
#     large ones         by their buffers
#
# TensorFlow's variables are copy-on-write: while we hold the tensor that a variable had after the last step, any other
# write has to give the variable another buffer, and ours cannot be reused. So a variable whose buffer is still ours is
# unchanged. Before a step our tensors are let go, so that updates happen in place. To copy some kilobytes,
# and compare them, takes less than to make tensor objects of them and find out where they are.

SMALL = 1 << 14
"""Bytes of a variable at most."""
_STACKED = INEXACT | INTEGER | {BOOL}
"""Types that TensorFlow makes rows of, and numpy compares."""


class MirrorGuard:
    """Refreshes the mirrors of the variables of one step when they were written outside it; tells which those are.

    Args:
        mirrored: variables with mirrors, or such of which writes are noticed.
    """

    def __init__(self, mirrored: Iterable[Mirrored], sharded: Iterable[ShardedCopies], mirrors: Mirrors) -> None:
        self._mirrors, whole, cut = mirrors, list(mirrored), list(sharded)
        self._rows = [StackRows(stack) for stack in stacks_of(whole)]
        small = {id(variable) for rows in self._rows for variable in rows.variables}
        self.variables: tuple[Mirrored | ShardedCopies, ...] = (*whole, *cut)
        self.single = tuple(v for v in whole if v.watchable and id(v) not in small)
        self._told: tuple[Mirrored | ShardedCopies, ...] = (*self.single, *cut)
        self._watched = tuple(v for v in self._told if v.watchable)
        self._unwatched = tuple(v for v in self.variables if not v.watchable)
        self._read = self._reader()

    def _reader(self) -> Reader | None:
        """Return what reads the watched variables, those of stacks last."""
        variables = [*self._watched, *(v for rows in self._rows for v in rows.variables)]
        if not variables:
            return None
        positions = iter(range(len(self._watched), len(variables)))
        stacks = [[next(positions) for _ in rows.variables] for rows in self._rows]
        return Reader([v.handle for v in variables], [v.dtype.as_datatype_enum for v in variables], stacks)

    @property
    def stacks(self) -> list[list[tuple[Mirrored, ...]]]:
        """The small variables: those of one type and shape together, in lists by device."""
        stacks = [rows.variables for rows in self._rows]
        return [list(those) for _, those in groupby(stacks, key=lambda one: one[0].handle.device)]

    def before(self) -> list[tuple[Mirrored | ShardedCopies, Any]]:
        """Refresh what was written since the last step, and let go of its values; return what has changed."""
        written: list[tuple[Mirrored | ShardedCopies, Any]] = []
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
        """Take what is known of the variables from the step that ran last."""
        if self._mirrors.holder is self:
            return
        if self._mirrors.holder is not None:
            self._mirrors.holder.give()
        self._mirrors.holder = self
        for rows in self._rows:
            rows.take()

    def give(self) -> None:
        """Let each variable know its value."""
        for rows in self._rows:
            rows.give()

    def after(self, values: Sequence[Any]) -> None:
        """Take the values that the variables have after a step.

        Args:
            values: of those that are read one by one, of shards, and of the stacks.
        """
        rest = iter(values)
        for variable in self._told:
            variable.after([next(rest) for _ in range(variable.parts)])
        for rows, stack in zip(self._rows, rest, strict=True):
            rows.after(stack)
        self._know(variable for variable in self._unwatched if variable.alone)

    def after_in_graph(self, values: Sequence[Any]) -> list[Any]:
        """Give the user's variables what their shards hold, in the function that is being traced; return the ops.

        Args:
            values: as `after` gets them.
        """
        rest = iter(values)
        told = [(variable, [next(rest) for _ in range(variable.parts)]) for variable in self._told]
        return [variable.join(pieces)[1] for variable, pieces in told if isinstance(variable, ShardedCopies)]

    def failed(self) -> None:
        """Keep what steps have done of which the last one has failed: what shards hold, what replicas have alone."""
        for variable in self.variables:
            if isinstance(variable, ShardedCopies):
                variable.join(variable.held())
            variable.seen = None
        self._know(variable for variable in self.variables if variable.alone)

    @staticmethod
    def _know(variables: Iterable[Mirrored | ShardedCopies]) -> None:
        for variable in variables:
            variable.seen = variable.value()

    def in_graph(self) -> list[Any]:
        """Copy every variable to its mirrors, in the function that is being traced; return the ops."""
        return [op for copied in self.variables if copied.copies for op in copied.refresh(copied.value())]


def are_same(old: Sequence[Any], new: Sequence[Any]) -> list[bool]:
    """Return of each pair of tensors whether they are one buffer; there are hundreds of them in every step.

    Args:
        old: tensors, or None for what is not known.
    """
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(old, new, strict=True)]
    # Two buffers of which both are held do not overlap: what shares memory is one. The rest is looked at closely.
    return [np.may_share_memory(a, b) or is_same(a, b) for a, b in pairs]


def is_same(old: Any, new: Any) -> bool:
    """Return whether two tensors are one buffer; scalars, which numpy copies, are compared bit by bit.

    Texts are not known by the bits of an array, which are pointers: what holds them may be another buffer.
    """
    a, b = np.asarray(old), np.asarray(new)
    if a.shape != b.shape or a.dtype == object:
        return False
    if a.ndim == 0 or a.size == 0:
        return a.tobytes() == b.tobytes()
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def stacks_of(variables: Iterable[Mirrored]) -> list[list[Mirrored]]:
    """Return the small ones among variables, by type, shape and device; those of one device stand together."""
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
        """Take what is known of each variable: another step has seen it last."""
        rows = [variable.seen for variable in self.variables]
        self._seen = np.stack([np.asarray(row) for row in rows]) if all(row is not None for row in rows) else None

    def give(self) -> None:
        """Let each variable know its value: another step is the next to look."""
        if self._seen is not None:
            for variable, value in zip(self.variables, self._seen, strict=True):
                variable.seen = value

    def forget(self) -> None:
        """Know nothing of them together: a step begins, and may fail."""
        self._seen = None

    def after(self, values: Any) -> None:
        """Keep the values after a step.

        Args:
            values: tensor, one row for each variable.
        """
        self._seen = np.asarray(values)

    def changed(self, now: Any) -> list[Mirrored]:
        """Return the variables that somebody has written since the last step.

        Args:
            now: tensor of the values that they have, one row for each.
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
# They are made when the function is first traced; a checkpoint that was restored before gives them their values then.


class ExtraState:
    """The variables that all traces of one function or model share."""

    def __init__(self) -> None:
        self._tf = tensorflow()
        self.module = self._tf.Module(name="state")

    def of(self, variable: Variable, replica: int, device: str) -> Any:
        """Return one replica's variable, making it if there is none; replicas are counted over all processes."""
        name = f"{variable.name}/replica_{replica}"
        found = getattr(self.module, name, None)
        if found is None:
            with self._tf.init_scope(), self._tf.device(device):
                zeros = self._tf.zeros(variable.shape, variable.dtype)
                found = self._tf.Variable(zeros, trainable=False, name=variable.name)
            setattr(self.module, name, found)
        if (tuple(found.shape), found.dtype.name) != (variable.shape, variable.dtype):
            raise GraphError(
                f"'{variable.name}' is {found.dtype.name}{list(found.shape)} in one trace of the step and "
                f"{variable.dtype}{list(variable.shape or ())} in another",
                hint="trace the step once: pass specs to ar.distribute",
            )
        return found


@functools.cache
def trackable(cls: Any) -> Any:
    """Return a subclass that `tf.train.Checkpoint` takes; `_track_trackable` gives its instances what is saved."""
    base = tensorflow().__internal__.tracking.Trackable
    return type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
