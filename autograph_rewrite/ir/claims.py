"""Defines claims: the results of propagation as plain data, which the certificate checks independently of propagation.

%dw   Claim("partial", op="sum", shape=(3, 4))         each replica holds a contribution
dw ─► apply   Read("replicated")                       the update reads it whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import REPLICA, Axis

Dim = Any
"""A size: an integer, a pair (constant, symbols) of which those that begin with `b` count a block, or None."""

SEGMENTS = "b["
"""Prefix of the symbol of a block with segments of several parts: `b[1,2]` counts, for each example, one row of the
first part and two of the second."""


@cache
def segment_rows(symbol: str) -> tuple[int, ...]:
    """Return how many rows of each segment one example has; empty for the symbol of a block without segments."""
    if not symbol.startswith(SEGMENTS):
        return ()
    return tuple(int(rows) for rows in symbol[len(SEGMENTS) : -1].split(","))


SHARDS = "b/"
"""Prefix of the symbol of a shard: `b/3,2` is 3 on the first replica, and 2 on the second."""


@cache
def sizes_of_shards(symbol: str) -> tuple[int, ...]:
    """Return the size of each shard; empty for a symbol that counts examples."""
    return tuple(map(int, symbol.removeprefix(SHARDS).split(","))) if symbol.startswith(SHARDS) else ()


class Claim(NamedTuple):
    """The claim about each instance of a value, where the value is produced.

    Attributes:
        kind: replicated, split, partial, local, any or unknown.
        dim: the dimension that is split.
        op: the reduction that combines contributions.
        shape: of one instance; None for an unknown rank.
        value: contents of a small integer value, flat.
        zero: all elements are zero.
        axes: for a vector of dimensions known at run time only: those that it names, and those that it may name.
    """

    kind: str
    dim: int = 0
    op: str = ""
    shape: tuple[Dim, ...] | None = None
    value: tuple[Dim, ...] | None = None
    zero: bool = False
    axes: tuple[frozenset[int], frozenset[int]] | None = None

    @property
    def differs(self) -> bool:
        """Whether instances hold different values."""
        return self.kind in ("split", "partial", "local")


class Read(NamedTuple):
    """The claimed placement in which a node reads an input.

    Attributes:
        kind: own (as it was produced), replicated, split, partial or entry.
        dim: the dimension of a block; or the position of the entry of a shape.
        unit: rows of each example in the block.
        size: the required value of the entry of a shape.
        segments: rows of each example in each segment of a block, instead of `unit`.
        shards: the size of each shard, where the node reads shards of a variable.
        rows: the rows that a window reads, counted from the first of the block, including rows of neighbours and
            padding; for the entry of a shape, the rows that it counts.
        lowest: padding is the lowest number instead of zero.
    """

    kind: str
    dim: int = 0
    unit: int = 1
    size: Dim = None
    segments: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    lowest: bool = False


OWN = Read("own")


class Stated(NamedTuple):
    """A user's description of a custom op (`ar.register_op`).

    Attributes:
        factors: the names of its dimensions, as text.
        linear: operands in each of which it is linear while the others are replicated.
        additive: it is linear in all operands together.
    """

    factors: str
    linear: tuple[int, ...] = ()
    additive: bool = False


@dataclass(frozen=True)
class Claims:
    """All claims about one graph.

    Attributes:
        values: by value name.
        reads: by node name and input index; reads of kind `OWN` are left out.
        outputs: names of the declared outputs by their anchor.
        instances: how many instances an EACH node has.
        micro: how many of them run one after the other on one replica.
        batch: the static size of the batch, or None.
        interleaved: micro-batch k has examples k, k + micro, k + 2 micro, ...
        processes: how many processes the plan has.
        folded: nodes whose value propagation knows to be constant.
        carriers: nodes that pass a converted value to the next iteration.
        inexact: the differences from one device that the configuration allows.
        stated: users' descriptions of ops, by op type.
        model: how many devices of each replica run one program, each on its blocks.
        divided: the axes that these devices form, with their sizes, where there are several.
        axis: the axis of the mesh that the placements refer to.
    """

    values: Mapping[str, Claim]
    reads: Mapping[tuple[str, int], Read]
    outputs: Mapping[str, str]
    instances: int
    micro: int = 1
    batch: int | None = None
    interleaved: bool = False
    processes: int = 1
    folded: frozenset[str] = frozenset()
    carriers: frozenset[str] = frozenset()
    inexact: Sequence[str] = field(default_factory=tuple)
    stated: Mapping[str, Stated] = field(default_factory=dict)
    model: int = 1
    divided: tuple[Axis, ...] = ()
    axis: str = REPLICA


class Certifier(Protocol):
    """Follows a rewrite from the original to the folded graph, and raises VerifyError where it is wrong."""

    def begin(self, graph: Graph, targets: Sequence[str]) -> None:
        """Take the normalised original."""

    def placed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph for whose values placements among the devices of a replica are claimed."""

    def written(self, before: Graph, graph: Graph, claims: Claims) -> None:
        """Take the program of one device, with the graph that it is made from and the claims about that graph."""

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph whose placements are claimed."""

    def check(self, after: str, graph: Graph) -> None:
        """Check the folded graph after a pass."""
