"""Finds what somebody else than the step has written since the last one, and refreshes the mirrors of it.

    small variables    by their contents: those of one type and shape are read as the rows of one tensor
    large ones         by their buffers

TensorFlow's variables are copy-on-write: while we hold the tensor that a variable had after the last step, any other
write has to give the variable another buffer, and ours cannot be reused. So a variable whose buffer is still ours is
unchanged. Before a step our tensors are let go, so that updates happen in place. To copy some kilobytes,
and compare them, takes less than to make tensor objects of them and find out where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from autograph_rewrite.ir.types.dtypes import BOOL, INEXACT, INTEGER
from autograph_rewrite.runtime.engine.call_by_name import Reader
from autograph_rewrite.runtime.function.mirrored_variables import Array, Mirrored, Mirrors, ShardedCopies, is_equal

SMALL = 1 << 14
"""Bytes of a variable at most."""
_STACKED = INEXACT | INTEGER | {BOOL}
"""Types that TensorFlow makes rows of, and numpy compares."""


class MirrorGuard:
    """Refreshes the mirrors of the variables of one step when they were written outside it; tells which those are.

    Args:
        mirrored: variables with mirrors, or such of which writes are noticed.
        sharded: variables in shards.
        mirrors: of the function.
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
        if shape is None or not variable.watchable or dtype.as_datatype_enum not in _STACKED:
            continue
        if math.prod(shape) * dtype.size <= SMALL:
            found.setdefault((variable.handle.device, dtype.name, shape), []).append(variable)
    return [found[key] for key in sorted(found)]


class StackRows:
    """The values of the variables of one stack after the last step.

    Args:
        variables: of one type, shape and device.
    """

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
