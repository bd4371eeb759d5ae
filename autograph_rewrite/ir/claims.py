"""Claims: the results of propagation as plain data, which a certificate checks without knowing how they were found.

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
"""How the symbol of a block begins that has a segment of each of several parts: `b[1,2]` counts one row of the first
part, and two of the second, for each example."""


@cache
def segment_rows(symbol: str) -> tuple[int, ...]:
    """Return how many rows of each segment one example has, by the symbol of a block; nothing if it has none."""
    if not symbol.startswith(SEGMENTS):
        return ()
    return tuple(int(rows) for rows in symbol[len(SEGMENTS) : -1].split(","))


SHARDS = "b/"
"""How the symbol of a shard begins: `b/3,2` is 3 on the first replica, and 2 on the second."""


@cache
def sizes_of_shards(symbol: str) -> tuple[int, ...]:
    """Return the size of each shard, by their symbol; nothing if it counts examples."""
    return tuple(map(int, symbol.removeprefix(SHARDS).split(","))) if symbol.startswith(SHARDS) else ()


class Claim(NamedTuple):
    """What each instance of a value is said to hold where it is produced.

    Attributes:
        kind: replicated, split, partial, local, any or unknown.
        dim: the dimension that is cut.
        op: how contributions are combined.
        shape: of one instance; None for an unknown rank.
        value: contents of a small integer value, flat.
        zero: all elements are zero.
        axes: of a vector of dimensions that only the run will tell: those that it names, and those that it may name.
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
    """As what a node is said to read one of its inputs.

    Attributes:
        kind: own (as it was produced), replicated, split, partial or entry.
        dim: the dimension of a block; or the position of the entry of a shape.
        unit: rows of each example in the block.
        size: what the entry of a shape has to be.
        segments: rows of each example in each segment of a block, in the place of `unit`.
        shards: the size of each shard, where it is read as shards of a variable.
        rows: which are read by a window, counted from the first of the block, rows of neighbours and padding among
            them; of the entry of a shape, so many are meant.
        lowest: padding is the lowest number, and not zero.
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
    """What a user has said of an op that nobody else knows (`ar.register_op`).

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
    """Everything that is claimed about one graph.

    Attributes:
        values: by value name.
        reads: by node name and input index, where that is not `OWN`.
        outputs: names of the declared outputs by their anchor.
        instances: how many instances an EACH node has.
        micro: how many of them follow each other on one replica.
        batch: the static size of the batch, or None.
        interleaved: whether a micro-batch has every so-many-th example.
        processes: how many processes the plan has.
        folded: nodes that are constants after all.
        carriers: nodes that hand a converted value to the next iteration.
        inexact: what the configuration lets differ from one device.
        stated: what the user has said of ops, by op type.
        model: how many devices of each replica run one program, each of its blocks.
        divided: the axes along which they lie, with their sizes, where there are several.
        axis: along which the claims are.
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
    """Sees a rewrite from the original to the folded graph, and raises VerifyError where it is wrong."""

    def begin(self, graph: Graph, targets: Sequence[str]) -> None:
        """Take the normalised original."""

    def placed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph whose values placements among the devices of a replica are claimed of."""

    def written(self, before: Graph, graph: Graph, claims: Claims) -> None:
        """Take the program of one device, with the graph that it is written of and what is claimed of that."""

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph that placements are claimed of."""

    def check(self, after: str, graph: Graph) -> None:
        """Check the folded graph behind a pass."""
