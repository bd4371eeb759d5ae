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
    EACH = "each"  # once per replica, or per micro-batch of each


class Select(Enum):
    """Which instances of an EACH value a node that runs ONCE reads."""

    ALL = "all"  # one input per replica, in replica order
    FIRST = "first"  # replica 0's


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
