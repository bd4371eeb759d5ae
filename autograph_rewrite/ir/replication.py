"""The folded graph: how often a node runs (span), which instance an input selects, per-instance attributes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Axis(Enum):
    """An axis along which the instances of a node lie."""

    PROCESS = "process"
    REPLICA = "replica"
    MICRO = "micro"


class Span(Enum):
    """How often the expanded graph runs a node."""

    ONCE = "once"
    REPLICA = "replica"  # once per replica, for all of its micro-batches; where there are none, EACH says so
    EACH = "each"  # once per replica, or per micro-batch of each

    def is_rarer_than(self, other: Span) -> bool:
        """Return whether a node of this span reads several instances of one of the other, or has to choose one."""
        return other is not self and (self is Span.ONCE or other is Span.EACH)

    def count(self, instances: int, micro: int) -> int:
        """Return how many instances a node of this span has.

        Args:
            instances: those of an EACH node.
            micro: how many of them belong to one replica.
        """
        if self is Span.EACH:
            return instances
        return 1 if self is Span.ONCE else instances // micro


class Select(Enum):
    """Which instances of a value a node reads that runs less often: ONCE of all, REPLICA of its own micro-batches."""

    ALL = "all"  # one input per instance, in their order
    FIRST = "first"  # that of replica 0, or of the first micro-batch


@dataclass(frozen=True)
class PerInstance:
    """Raw attribute values that differ between the instances of an EACH node."""

    raws: tuple[bytes, ...]


def instances_read(
    reader: Span, instance: int, producer: Span, select: Select | None, *, instances: int, micro: int
) -> range:
    """Return which instances of a producer one instance of a reader reads.

    Args:
        reader: its span.
        instance: which one.
        producer: its span.
        select: how the reader chooses, where it runs less often.
        instances: those of an EACH node.
        micro: how many of them belong to one replica.
    """
    mine, theirs = reader.count(instances, micro), producer.count(instances, micro)
    if theirs <= mine:
        own = instance * theirs // mine
        return range(own, own + 1)
    each = theirs // mine
    return range(instance * each, instance * each + (each if select is Select.ALL else 1))


_INSTANCE = re.compile(r"replica_\d+/(micro_\d+/)?")


def prefix(instance: int, micro: int = 1) -> str:
    """Return the name prefix of an instance, where each replica has `micro` micro-batches."""
    replica, part = divmod(instance, micro)
    return f"replica_{replica}/" if micro == 1 else f"replica_{replica}/micro_{part}/"


def common_name(name: str) -> str:
    """Return the name of an instance without its prefix: what all instances of a node have in common."""
    return _INSTANCE.sub("", name, count=1) if name.startswith("replica_") else name
