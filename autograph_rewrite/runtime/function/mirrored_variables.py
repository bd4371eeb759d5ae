"""Mirrored copies of the user's variables on the other devices, kept in sync.

    user's tf.Variable  @ device 0  ── the truth: checkpoints, callbacks and model.save see this one
    mirror              @ device 1  ── updated by every step as well; refreshed when somebody else wrote the variable

Who else wrote a variable is found without looking at its contents. TensorFlow's variables are copy-on-write: while we
hold the tensor that a variable had after the last step, any other write has to give the variable another buffer, and
ours cannot be reused. So a variable whose buffer is still ours is unchanged. Before a step our tensors are let go,
so that updates happen in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autograph_rewrite.item import Shards, Variable
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.function.compressor_state import ExtraState
from autograph_rewrite.runtime.function.served_variables import Held, Served
from autograph_rewrite.runtime.function.sharded_variables import Sharded
from autograph_rewrite.runtime.native import call_by_name, function_def


class Mirrored:
    """One variable of the user, its copies by device, and the value that all had after the last step.

    Args:
        handle: of the variable.
        dtype: TensorFlow's name of its element type.
        shape: static shape, None when unknown.
    """

    def __init__(self, handle: Any, dtype: str, shape: Sequence[int | None] | None) -> None:
        self._tf = tensorflow()
        self.handle = handle
        self.dtype = self._tf.as_dtype(dtype)
        self.copies: dict[str, Any] = {}
        self.seen: Any = None
        self.served: Served | None = None  # where its value may be on a server
        self.adopts = True  # in a job of several processes: what it holds is still this one's own
        self._shape = self._tf.TensorShape(shape)
        self.parts = 1  # tensors that tell its value after a step
        # Scalars of any type can be compared, strings cannot be watched.
        self.watchable = self.dtype.is_numpy_compatible and self.dtype != self._tf.string and "CPU" in handle.device

    def copy_on(self, device: str) -> Any:
        """Return the handle of the copy on a device, making it if there is none."""
        if device not in self.copies:
            with self._tf.init_scope(), self._tf.device(device):
                self.copies[device] = self._tf.Variable(
                    self.value(), trainable=False, dtype=self.dtype, shape=self._shape, name="mirror"
                )  # it shares the memory of the original until one of the two is written
        return self.copies[device].handle

    def value(self) -> Any:
        """Return what the user's variable holds."""
        if self.served is not None:
            self.served.here()
        return self._tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def write(self, value: Any) -> None:
        """Give the user's variable a value."""
        if self.served is not None:
            self.served.source = None
        if self.dtype != self._tf.string:
            with self._tf.device(self.handle.device):
                self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=self._tf.constant(value, self.dtype))

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

    def after_in_graph(self, values: Sequence[Any]) -> None:
        """Do nothing: the step has updated the user's variable, and nothing can be kept."""


class Mirrors:
    """The mirrored variables of one distributed function or model, shared by all its traces.

    Attributes:
        extra: the variables that rewriting added to it.
        held: what holds the handles of variables.
    """

    def __init__(self) -> None:
        self._known: dict[int, Mirrored] = {}
        self._cut: dict[tuple[int, Shards], Sharded] = {}
        self.extra = ExtraState()
        self.held = Held()

    def of(self, handle: Any, dtype: str, shape: Sequence[int | None] | None) -> Mirrored:
        """Return what is known of the variable with this handle.

        Args:
            handle: resource tensor of the user's variable.
            dtype: name of its type.
            shape: of its value; None where it is open.
        """
        if id(handle) not in self._known:
            self._known[id(handle)] = Mirrored(handle, dtype, shape)
            self.held.add(self._known[id(handle)])
        return self._known[id(handle)]

    def in_shards(self, handle: Any, variable: Variable, shards: Shards) -> Sharded:
        """Return the variable with this handle as it is cut into shards.

        Args:
            handle: resource tensor of the user's variable.
            variable: its type and shape.
            shards: how the rewrite has cut it.
        """
        key = id(handle), replace(shards, handles=())
        if key not in self._cut:
            self._cut[key] = Sharded(handle, variable.dtype, variable.shape, shards)
        return self._cut[key]


class Guard:
    """Refreshes the mirrors of the variables of one step when they were written outside it; tells which those are."""

    def __init__(self, variables: Iterable[Mirrored | Sharded]) -> None:
        self.variables = tuple(variables)
        self._told = tuple(v for v in self.variables if v.watchable or isinstance(v, Sharded))
        self.watched = tuple(v for v in self.variables if v.watchable)
        self._unwatched = tuple(v for v in self.variables if not v.watchable)
        self._handles = [v.handle for v in self.watched]
        self._read: call_by_name.Call | None = None
        if self.watched:
            types = [v.dtype.as_datatype_enum for v in self.watched]
            self._read = call_by_name.Call(function_def.reader(call_by_name.new_name("read"), types))

    def before(self) -> list[tuple[Mirrored | Sharded, Any]]:
        """Refresh what was written since the last step, and let go of its values; return what has changed."""
        written: list[tuple[Mirrored | Sharded, Any]] = []
        if self._read is not None:
            held, values = [mirrored.seen for mirrored in self.watched], self._read(self._handles)
            kept = are_same(held, values)
            for mirrored in self.watched:
                mirrored.seen = None
            for index in (i for i, same in enumerate(kept) if not same):
                mirrored, seen, now = self.watched[index], held[index], values[index]
                mirrored.refresh(now)
                if seen is None or not is_equal(seen, now):
                    written.append((mirrored, now))
        for mirrored in self._unwatched:
            mirrored.refresh(mirrored.value())
        return written

    def after(self, values: Iterable[Any]) -> None:
        """Take the values that the variables have after a step."""
        rest, is_eager = iter(values), tensorflow().executing_eagerly()
        for variable in self._told:
            tensors = [next(rest) for _ in range(variable.parts)]
            (variable.after if is_eager else variable.after_in_graph)(tensors)

    def in_graph(self) -> list[Any]:
        """Copy every variable to its mirrors, in the function that is being traced; return the ops."""
        return [op for copied in self.variables if copied.copies for op in copied.refresh(copied.value())]


def are_same(old: Sequence[Any], new: Sequence[Any]) -> list[bool]:
    """Return of each pair of tensors whether they are one buffer; there are hundreds of them in every step.

    Args:
        old: tensors, or None for what is not known.
        new: tensors.
    """
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(old, new, strict=True)]
    # Two buffers of which both are held do not overlap: what shares memory is one. The rest is looked at closely.
    return [np.may_share_memory(a, b) or (a.dtype != object and is_same(a, b)) for a, b in pairs]


def is_same(old: Any, new: Any) -> bool:
    """Return whether two tensors are one buffer; scalars, which numpy copies, are compared bit by bit."""
    a, b = np.asarray(old), np.asarray(new)
    if a.shape != b.shape:
        return False
    if a.ndim == 0 or a.size == 0:
        return a.tobytes() == b.tobytes()
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def is_equal(old: Any, new: Any) -> bool:
    """Return whether two tensors have the same contents, bit by bit."""
    a, b = np.asarray(old), np.asarray(new)
    return a.shape == b.shape and np.array_equal(_bits(a), _bits(b))


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
