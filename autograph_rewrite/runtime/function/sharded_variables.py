"""A user's variable whose value is kept in shards by a distributed function.

    user's tf.Variable  ── the truth: checkpoints, callbacks and model.save see this one
        │ cut, when somebody wrote it          ▲ joined, after every step, also one that failed
    w/part_0 @ device 0, w/part_1 @ device 1 ──┘

Who wrote it meanwhile is found as for mirrors: by whose buffer it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograph_rewrite.plan.parts.residence import shard_name
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.native import variable_pieces
from autograph_rewrite.training_graph import Shards


class Sharded:
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
        return variable_pieces.cut(self.shards, self.value() if value is None else value)

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
            whole = variable_pieces.join(self.shards, pieces)
            return whole, self._tf.raw_ops.AssignVariableOp(resource=self.handle, value=whole)
