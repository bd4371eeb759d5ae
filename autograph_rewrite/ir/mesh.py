"""Defines the mesh of a folded graph: the axes along which a node has instances, and which of them an input reads.

    %dw = MatMul(%x, %dy)  each          span {replica, micro}: an instance for each micro-batch of each replica
    %sum = AddN(all(%dw))                span {}: one for all of them, which reads them all
    %w = VarHandleOp()                   place {server: 1}: on the second of the devices that hold variables

A placement says how a value is spread, a span how often it is computed, a place where. The axes of a mesh are listed
major to minor: instances are counted along the minor axis first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from autograph_rewrite.ir.types.placement import AXES, MICRO, MODEL, PROCESS, REPLICA, SERVER, SHARD, STAGE

__all__ = [
    "ANYWHERE", "AXES", "EACH", "MICRO", "MODEL", "OFTEN", "ONCE", "PER_MODEL", "PER_REPLICA", "PROCESS", "REPLICA",
    "SERVER", "SHARD", "STAGE", "WITHIN", "WORDS", "Axis", "Mesh", "PerInstance", "Place", "Select", "Span",
    "common_name", "is_axis", "is_rarer", "prefix", "word",
]  # fmt: skip

Span = frozenset[str]
"""The names of the axes along which a node has instances. A mesh has their sizes; the mesh of a process is a part of
that of the job."""
ONCE: Span = frozenset()
PER_REPLICA: Span = frozenset((REPLICA,))
EACH: Span = frozenset((REPLICA, MICRO))
PER_MODEL: Span = frozenset((MODEL,))
"""Once for all replicas, on each device along the model axis."""
Place = Mapping[str, int | tuple[int, ...]]
"""The coordinates of a node on axes along which it has no instances, `stage=1`. A tuple gives one for each instance:
the server of each block of a variable. A node that one worker runs for the whole job is on process 0."""
ANYWHERE: Place = MappingProxyType({})
WORDS = {ONCE: "once", PER_REPLICA: "replica", EACH: "each"}
"""How the printed form names the spans of the batch."""
OFTEN = {ONCE: "once", PER_REPLICA: "once on each replica", EACH: "on each replica"}
"""How messages name them."""


def word(span: Span) -> str:
    """Return how the printed form names a span."""
    return WORDS.get(span) or f"{{{', '.join(sorted(span))}}}"


_AXIS = re.compile(rf"{'|'.join(AXES)}|{MODEL}_\d+")


def is_axis(name: str) -> bool:
    """Return whether a name is valid for an axis."""
    return _AXIS.fullmatch(name) is not None


def is_rarer(reader: Span, producer: Span) -> bool:
    """Return whether one instance of a reader meets several of a producer, and has to choose one or read all."""
    # A span with REPLICA implies the model axis: see `Mesh.along`.
    return not producer <= (reader | PER_MODEL if REPLICA in reader else reader)


WITHIN = frozenset((STAGE, MODEL))
"""The axes along which the devices of a replica are arranged."""
_LOCATED = WITHIN | {REPLICA}


class Select(Enum):
    """Which instances of a value a node reads, along the axes that its span lacks."""

    ALL = "all"  # one input per instance, in order
    FIRST = "first"  # the instance of replica 0, or of the first micro-batch
    EVERY = "every"  # one input per instance, also along the axes that both have: the values of all replicas
    OWN = "own"  # like EVERY, but of each instance the output with the reader's number: its block of each

    @property
    def is_of_many(self) -> bool:
        """Whether it stands for one input per instance."""
        return self is not Select.FIRST


class Axis(NamedTuple):
    """An axis of a mesh."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """The instances of a process, and the devices that they run on.

    Attributes:
        axes: major to minor.
        devices: of each stage and logical device of each replica, major to minor.
        shared: the devices that all replicas share, by their coordinate.
        along: the axes whose devices all run the program of their replica; a span with REPLICA implies them.
        divided: the axes that the model axis consists of, major to minor, where there are several.
    """

    axes: tuple[Axis, ...]
    devices: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    along: Span = ONCE
    divided: tuple[Axis, ...] = ()

    @classmethod
    def of(
        cls,
        replicas: int,
        micro: int = 1,
        places: Iterable[Axis] = (),
        *,
        model: int = 1,
        divided: tuple[Axis, ...] = (),
    ) -> Mesh:
        """Return the mesh of some replicas, each with `micro` micro-batches in sequence.

        Args:
            places: the axes on which nodes have coordinates.
            model: how many devices of a replica run one program, each on its blocks.
            divided: the axes that these devices form, major to minor, where there are several.
        """
        if model == 1:
            return cls((Axis(REPLICA, replicas), Axis(MICRO, micro), *places))
        stages = [axis for axis in places if axis.name == STAGE]  # the model devices of a stage are adjacent
        others = (axis for axis in places if axis.name not in (MODEL, STAGE))
        axes = (Axis(REPLICA, replicas), *stages, Axis(MODEL, model), Axis(MICRO, micro), *others)
        return cls(axes, along=frozenset((MODEL,)), divided=divided)

    def whole(self, span: Span) -> Span:
        """Return a span with the axes that REPLICA implies; see `along`."""
        return span | self.along if REPLICA in span else span

    def size(self, name: str) -> int:
        """Return how many coordinates an axis has."""
        return next((axis.size for axis in (*self.axes, *self.divided) if axis.name == name), 1)

    def lines(self, axes: Container[str]) -> list[list[int]]:
        """Return the numbers of a replica's devices in groups whose members differ along these axes only."""
        others = [name for name, _ in self.divided or (Axis(MODEL, 0),) if name not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for device in range(self.size(MODEL)):
            at = self.coordinates(PER_MODEL, device)
            found.setdefault(tuple(at.get(name, 0) for name in others), []).append(device)
        return list(found.values())

    def count(self, span: Span) -> int:
        """Return how many instances a node with this span has."""
        span = self.whole(span)
        return math.prod(size for name, size in self.axes if name in span)

    def read(self, reader: Span, instance: int, producer: Span, select: Select | None) -> list[int]:
        """Return which instances of a producer one instance of a reader reads.

        Args:
            select: how the reader chooses along the axes that it lacks.
        """
        at, wanted, producer = self.coordinates(reader, instance), [0], self.whole(producer)
        for name, size in self.axes:
            if name in producer:
                own = (at[name],) if name in at else range(size if select is Select.ALL else 1)
                is_every = select in (Select.EVERY, Select.OWN) and name not in self.along
                chosen = range(size) if is_every else own
                wanted = [first * size + i for first in wanted for i in chosen]
        return wanted

    def taken(self, reader: Span, producer: Span, select: Select | None = Select.ALL) -> int:
        """Return how many instances of a producer one instance of a reader reads."""
        return len(self.read(reader, 0, producer, select))

    def coordinates(self, span: Span, instance: int) -> dict[str, int]:
        """Return the coordinates of an instance on each axis of its span, and on the axes that divide `model`."""
        at, span = {}, self.whole(span)
        for name, size in reversed(self.axes):
            if name in span:
                instance, at[name] = divmod(instance, size)
        device = at.get(MODEL, 0)
        for name, size in reversed(self.divided if MODEL in at else ()):
            device, at[name] = divmod(device, size)
        return at

    def within(self) -> list[dict[str, int]]:
        """Return the places in a replica, the minor axis first."""
        span = (WITHIN - self.along) & {name for name, _ in self.axes}
        return [self.coordinates(span, i) for i in range(self.count(span))]

    def device(self, at: Mapping[str, int]) -> str:
        """Return the device at a coordinate; axes that are not named count as 0."""
        return self.shared[at[SERVER]] if SERVER in at else self.devices[self.number(_LOCATED, at)]

    def number(self, span: Span, at: Mapping[str, int]) -> int:
        """Return the number of a coordinate along some axes; axes that are not named count as 0."""
        index = 0
        for name, size in self.axes:
            if name in span:
                index = index * size + at.get(name, 0)
        return index


@dataclass(frozen=True)
class PerInstance:
    """Raw attribute values that differ between the instances of a node, in their order along its span."""

    raws: tuple[bytes, ...]


_INSTANCE = re.compile(r"replica_\d+/(micro_\d+/)?")


def prefix(instance: int, micro: int = 1) -> str:
    """Return the name prefix of an instance, where each replica has `micro` micro-batches."""
    replica, part = divmod(instance, micro)
    return f"replica_{replica}/" if micro == 1 else f"replica_{replica}/micro_{part}/"


def common_name(name: str) -> str:
    """Return the name of an instance without its prefix, which all instances of a node share."""
    return _INSTANCE.sub("", name, count=1) if name.startswith("replica_") else name
