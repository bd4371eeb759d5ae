"""Mirrored copies of the user's variables on the other devices, kept in sync (`guard`).

user's tf.Variable  @ device 0  ── the truth: checkpoints, callbacks and model.save see this one
mirror              @ device 1  ── updated by every step as well; refreshed when somebody else wrote the variable
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from autograph_rewrite.plan.parts.residence import shard_name
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine import variable_copies
from autograph_rewrite.runtime.function.compressor_state import ExtraState
from autograph_rewrite.runtime.function.served_variables import Held, Served
from autograph_rewrite.training_graph import Shards, Variable

Array = np.ndarray[Any, Any]


class Mirrored:
    """One variable of the user, its copies by device, and the value that it had after the last step.

    Args:
        handle: of the variable.
        dtype: TensorFlow's name of its element type.
        shape: static shape, None when unknown.

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
        self._shape = self._tf.TensorShape(shape)
        self.parts = 1  # tensors that tell its value after a step
        # Scalars of any type can be compared, strings cannot be watched.
        self.watchable = self.dtype.is_numpy_compatible and self.dtype != self._tf.string and "CPU" in handle.device

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The static shape; None where a dimension is open."""
        return tuple(self._shape.as_list()) if self._shape.is_fully_defined() else None

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
        self.seen = None
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


class Holder(Protocol):
    """What knows the values that variables had after the last step."""

    def give(self) -> None:
        """Let each variable know its value."""


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
        self.holder: Holder | None = None

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

    def in_shards(self, handle: Any, variable: Variable, shards: Shards) -> ShardedCopies:
        """Return the variable with this handle as it is cut into shards.

        Args:
            handle: resource tensor of the user's variable.
            variable: its type and shape.
            shards: how the rewrite has cut it.
        """
        key = id(handle), replace(shards, handles=())
        if key not in self._cut:
            self._cut[key] = ShardedCopies(handle, variable.dtype, variable.shape, shards)
        return self._cut[key]


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

    Args:
        handle: of the user's variable.
        dtype: TensorFlow's name of its element type.
        shape: of the whole.
        shards: how it is cut.

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

    def copy_on(self, device: str) -> list[Any]:
        """Return the handles of the shards that a replica uses, making them if there are none."""
        places = self.shards.of_replica(device)
        if places not in self.copies:
            with self._tf.init_scope():
                self.copies[places] = tuple(
                    self._made(k, part, place) for k, (part, place) in enumerate(zip(self._cut(), places, strict=True))
                )
        return [shard.handle for shard in self.copies[places]]

    def _made(self, shard: int, value: Any, device: str) -> Any:
        with self._tf.device(device):
            return self._tf.Variable(value, trainable=False, dtype=self.dtype, name=shard_name("shard", shard))

    def _cut(self, value: Any = None) -> Sequence[Any]:
        return variable_copies.cut(self.shards, self.value() if value is None else value)

    def value(self) -> Any:
        """Return what the user's variable holds."""
        return self._tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def held(self) -> list[Any]:
        """Return what the shards hold that the first replica uses."""
        return [shard.read_value() for shard in next(iter(self.copies.values()))]

    def refresh(self, value: Any) -> list[Any]:
        """Give the shards of all copies a value; return the ops, which exist while a function is traced."""
        ops = []
        parts = self._cut(value)
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
