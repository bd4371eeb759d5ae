"""Defines rules: small pure functions from the facts of a node's inputs to the placements of its outputs.

A rule answers three questions about one op type, each with its own function in a `Rule`:

    place(n)  the placements of the outputs, and the inputs to convert first (`operand_reshards`)
    shape(n)  the shape of one instance of each output, from the inputs after conversion
    value(n)  contents of small integer outputs, symbolically (sizes); None where the op never makes sizes

They depend only on op, attributes and facts, so that results are cached across equal nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from autograph_rewrite.ops.facts.placement import REPLICATED, Axes, Extent, Fact, Placement, Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym, rows_per_example, segments, shards_of
from autograph_rewrite.ops.facts.windows import Halo

OWN_VALUE = Placement("partial", op="own")
"""The placement of a varying value: each replica has a different one, and no reduction combines them."""


class Semantics(NamedTuple):
    """The choices of the config that rules depend on, and the axes.

    Attributes:
        random: "exact" draws the numbers that one device would draw; "independent" lets each replica draw its block.
        batch_norm: "sync" uses the statistics of the whole batch; "local" those of each block.
        extent: of the axis that the rules are on; for the batch, its units are the examples, where they are static.
        segments: blocks may have a segment from each part of a concatenation.
        more: extents of further axes, minor to the first.
        alike: the devices of a replica run one program, each on its blocks; from a table that is split by rows, each
            device looks up the rows that it holds.
    """

    random: str = "exact"
    batch_norm: str = "sync"
    extent: Extent = Extent()
    segments: bool = False
    more: tuple[Extent, ...] = ()
    alike: bool = False

    def on(self, extent: Extent) -> Semantics:
        """Return the semantics for rules on one of the axes."""
        if not self.more:
            return self
        return self._replace(extent=extent, segments=self.segments and extent == self.extent, more=())


class Op(NamedTuple):
    """A node as a rule sees it.

    Attributes:
        attr: reads a decoded attribute by name, or its declared default.
        inputs: facts of the inputs. `shape` and `value` functions get the facts after conversion.
        output_dtypes: element type of each output.
        static: static global shapes of the outputs as the graph states them (entries None where unknown), or None.
        semantics: the config's choices.
        cells: for each handle input, by index, the joined fact of the elements of its container.
    """

    op: str
    attr: Callable[..., Any]
    inputs: tuple[Fact, ...]
    output_dtypes: tuple[int, ...]
    static: tuple[Shape | None, ...]
    semantics: Semantics
    cells: Mapping[int, Fact]

    def placement(self, index: int) -> Placement:
        """Placement of one input."""
        return self.inputs[index].placement

    def shape(self, index: int) -> Shape | None:
        """Shape of one instance of one input."""
        return self.inputs[index].shape

    def rank(self, index: int) -> int | None:
        """Rank of one input."""
        return self.inputs[index].rank

    def value(self, index: int) -> tuple[Dim, ...] | None:
        """Known integer contents of one input."""
        return self.inputs[index].value

    def ints(self, index: int) -> tuple[int, ...] | None:
        """Contents of one input where all entries are plain integers."""
        value = self.inputs[index].value
        if value is None or not all(isinstance(v, int) for v in value):
            return None
        return tuple(v for v in value if isinstance(v, int))


class LocalEntry(NamedTuple):
    """A conversion of a shape operand: entry `position`, a global size, becomes the block size `size`.

    With a `halo` it becomes the number of rows that a device reads.
    """

    position: int
    size: Dim
    halo: Halo | None = None


class Slice(NamedTuple):
    """A conversion of a replicated input to this replica's block of `dim`, in which one example has `unit` rows.

    With `shards`, the block is the shard of a variable, with `unit` rows for each row of the shard. With `segments`,
    one example has so many rows in each segment, and `unit` is the sum. With a `halo`, rows of neighbouring blocks are
    added, and the input may already be split.
    """

    dim: int
    unit: int
    segments: tuple[int, ...] = ()
    halo: Halo | None = None
    shards: tuple[int, ...] = ()


def block_of(dim: int, size: Dim) -> Slice | None:
    """Return the conversion of a replicated input to its block; None where the rows of an example are not known."""
    if isinstance(size, Sym) and (shards := shards_of(size)):
        return Slice(dim, size.coef, shards=shards)
    rows = rows_per_example(size)
    return None if rows is None else Slice(dim, rows, segments(size))


Reshard = Placement | LocalEntry | Slice
"""The target of a conversion: REPLICATED, PARTIAL, split(d), a Slice of a replicated value, or a LocalEntry."""


class Placed(NamedTuple):
    """The answer of `place`.

    Attributes:
        outputs: a placement per output.
        operand_reshards: conversions by input index; other inputs are read as they are.
        decompose: the op has to be rewritten into simpler ops first (`passes.canonicalize.decompose`), for example a
            mean over the split dimension; `outputs` then only matters until the next round.
        zero: whether each output is known to be zero.
        holds: for writes, (input index of the container, input index of the element put into it).
        note: why the op runs whole although a rule could divide it, for the report; `semantics.strict` refuses it.
    """

    outputs: tuple[Placement, ...]
    operand_reshards: Mapping[int, Reshard] = {}
    decompose: bool = False
    zero: tuple[bool, ...] = ()
    holds: tuple[int, int] | None = None
    note: str = ""


Attr = Callable[..., Any]
"""Reads a decoded attribute of a node by name."""
Numbers = Sequence[Sequence[int]]
"""Shapes of operands or results, in numbers."""


class Rule(NamedTuple):
    """The rule of one op type.

    Attributes:
        family: the module that defines it.
        pinned: runs once, whatever the mode (randomness, input, side effects).
        axes: for outputs that name dimensions, bounds on these where `value` does not know them.
        identity: the shape or value rule needs fresh symbols, so results are not shared between nodes.
        work: floating-point operations of one call, from attributes and the shapes of operands and results; None: one
            for each element.
        kernel: computes integers from integers, for constant folding.
        scratch: elements that a kernel copies while it runs, from attributes and the shapes of operands.
        patches: elements of image patches that a CPU kernel holds, from the shapes of operands and results, the bytes
            of an element, and the threads.
    """

    place: Callable[[Op], Placed | None]
    shape: Callable[[Op], tuple[Shape | None, ...]] | None = None
    value: Callable[[Op], tuple[tuple[Dim, ...] | None, ...] | None] | None = None
    family: str = ""
    pinned: bool = False
    axes: Callable[[Op], tuple[Axes | None, ...]] | None = None
    identity: bool = False
    work: Callable[[Attr, Numbers, Numbers], float] | None = None
    kernel: Callable[[Attr, Sequence[Any]], Any] | None = None
    scratch: Callable[[Attr, Numbers], int] | None = None
    patches: Callable[[Numbers, Numbers, int, int], int] | None = None


def whole(n: Op) -> Placed:
    """Convert all inputs to their whole, global value; the outputs are replicated. Sound for every op."""
    return Placed((REPLICATED,) * len(n.output_dtypes), others_whole(n))


def others_whole(n: Op, *kept: int) -> dict[int, Reshard]:
    """Return the conversions that make all inputs whole, except those in `kept`."""
    return {i: REPLICATED for i, fact in enumerate(n.inputs) if i not in kept and fact.placement.differs}


def made_whole(n: Op, index: int) -> dict[int, Reshard]:
    """Return the conversion that makes one input whole, if it needs one."""
    return {index: REPLICATED} if n.placement(index).differs else {}


Values = tuple[tuple[Dim, ...] | None, ...]
"""Contents of small integers, for each output."""


def stated(n: Op) -> tuple[Shape | None, ...]:
    """Return shapes as the graph states them."""
    return n.static


def like_first(n: Op) -> tuple[Shape | None, ...]:
    """Return the shape of the first input for each output."""
    return (n.shape(0),) * len(n.output_dtypes)


def first_value(n: Op) -> Values:
    """Return the contents of the first input for each output."""
    return (n.value(0),) * len(n.output_dtypes)


def scalar(n: Op) -> tuple[Shape | None, ...]:
    """Return the shape of a single number."""
    return ((),)
