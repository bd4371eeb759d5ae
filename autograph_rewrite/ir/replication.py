"""The folded graph: how often a node runs (span), which instance an input selects, per-instance attributes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum


class Axis(Enum):
    """An axis along which the instances of a node lie."""

    PROCESS = "process"
    REPLICA = "replica"
    MICRO = "micro"


class Span(Enum):
    """How often a process runs a node: the axes along which its instances lie."""

    ONCE = frozenset[Axis]()
    REPLICA = frozenset((Axis.REPLICA,))  # once for all micro-batches of a replica
    EACH = frozenset((Axis.REPLICA, Axis.MICRO))

    @property
    def word(self) -> str:
        """How texts name it."""
        return self._name_.lower()

    def is_rarer_than(self, other: Span) -> bool:
        """Return whether a node of this span reads several instances of one of the other, or has to choose one."""
        return not other._value_ <= self._value_


class Select(Enum):
    """Which instances of a value a node reads that runs less often: ONCE of all, REPLICA of its own micro-batches."""

    ALL = "all"  # one input per instance, in their order
    FIRST = "first"  # that of replica 0, or of the first micro-batch


@dataclass(frozen=True)
class Mesh:
    """The instances of a process: its replicas, and the micro-batches of each, which follow one another.

    Attributes:
        replicas: of this process.
        micro: micro-batches of each.
    """

    replicas: int
    micro: int = 1

    @property
    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """Its axes, the major one first, and their sizes."""
        return (Axis.REPLICA, self.replicas), (Axis.MICRO, self.micro)

    def count(self, span: Span) -> int:
        """Return how many instances a node of this span has."""
        return math.prod(size for axis, size in self.axes if axis in span._value_)

    def read(self, reader: Span, instance: int, producer: Span, select: Select | None) -> list[int]:
        """Return which instances of a producer one instance of a reader reads.

        Args:
            select: how the reader chooses along the axes that it lacks.
        """
        place, wanted = self._place(reader, instance), [0]
        for axis, size in self.axes:
            if axis in producer._value_:
                chosen = (place[axis],) if axis in place else range(size if select is Select.ALL else 1)
                wanted = [first * size + i for first in wanted for i in chosen]
        return wanted

    def _place(self, span: Span, instance: int) -> dict[Axis, int]:
        """Return where an instance lies along each axis of its span."""
        place = {}
        for axis, size in reversed(self.axes):
            if axis in span._value_:
                instance, place[axis] = divmod(instance, size)
        return place


@dataclass(frozen=True)
class PerInstance:
    """Raw attribute values that differ between the instances of an EACH node."""

    raws: tuple[bytes, ...]


_INSTANCE = re.compile(r"replica_\d+/(micro_\d+/)?")


def prefix(instance: int, micro: int = 1) -> str:
    """Return the name prefix of an instance, where each replica has `micro` micro-batches."""
    replica, part = divmod(instance, micro)
    return f"replica_{replica}/" if micro == 1 else f"replica_{replica}/micro_{part}/"


def common_name(name: str) -> str:
    """Return the name of an instance without its prefix: what all instances of a node have in common."""
    return _INSTANCE.sub("", name, count=1) if name.startswith("replica_") else name
