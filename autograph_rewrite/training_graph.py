"""TrainingGraph: a graph with its training signature (inputs, outputs, targets, variables).

It is a value: rewriting makes a new one and never changes the old one. `item.GraphItem` adds what users call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.annotations import Annotations
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.recorded_shapes import Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import drop_newer_attrs
from autograph_rewrite.requires import tensorflow

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the step.

    Attributes:
        name: public name: placeholder name, argument path ("x/image") or output name.
        tensor: the tensor in the graph, "x:0".
        dtype: TensorFlow's name of the element type.
        shape: static shape, None for unknown dimensions; None as a whole for an unknown rank.
        batch_axis: the axis that counts examples; None for an input that all replicas share.
    """

    name: str
    tensor: str
    dtype: str
    shape: Shape | None
    batch_axis: int | None = None


@dataclass(frozen=True)
class Shards:
    """The pieces in which a rewritten graph holds a variable.

    Attributes:
        axis: along which they are joined.
        sizes: of the pieces along it.
        handles: names of the nodes that give their handles, in order; those of pieces of pieces, where there are some.
        devices: where they live, in order, of one replica after another where each has its own; empty where every
            replica's device, or the first, has all of them.
        within: how each piece is cut again, None where it is not; empty: none is.
        elsewhere: the numbers of the pieces of other workers, each of which writes its own.
        copies: the handles that each replica has, where the pieces are the instances of one node.
    """

    axis: int
    sizes: tuple[int, ...]
    handles: tuple[str, ...]
    devices: tuple[str, ...] = ()
    within: tuple[Shards | None, ...] = ()
    elsewhere: tuple[int, ...] = ()
    copies: tuple[tuple[str, ...], ...] = ()

    @property
    def count(self) -> int:
        """How many pieces there are, with those of pieces."""
        return sum(1 if one is None else one.count for one in self.within or (None,) * len(self.sizes))

    def cut(self, value: T, split: Callable[[T, tuple[int, ...], int], Sequence[T]]) -> list[T]:
        """Return the pieces of a value.

        Args:
            split: cuts a value into sizes along an axis.
        """
        found: list[T] = []
        parts = split(value, self.sizes, self.axis)
        for part, one in zip(parts, self.within or (None,) * len(self.sizes), strict=True):
            found += [part] if one is None else one.cut(part, split)
        return found

    def join(self, pieces: Sequence[T], concat: Callable[[list[T], int], T]) -> T:
        """Return the whole of its pieces.

        Args:
            pieces: in the order of the handles.
            concat: joins values along an axis.
        """
        parts, rest = [], list(pieces)
        for one in self.within or (None,) * len(self.sizes):
            own, rest = (rest[:1], rest[1:]) if one is None else (rest[: one.count], rest[one.count :])
            parts.append(own[0] if one is None else one.join(own, concat))
        return concat(parts, self.axis)

    def places(self, copy: int, device: str) -> tuple[str, ...]:
        """Return where the pieces of a copy live.

        Args:
            copy: its number; where `devices` has no more than one copy's, all have theirs there.
            device: of a copy that has all of its pieces in one place.
        """
        count = self.count
        if not self.devices:
            return (device,) * count
        first = copy * count % len(self.devices)
        return self.devices[first : first + count]


@dataclass(frozen=True)
class Variable:
    """A variable of the graph.

    Attributes:
        handle: name of the node that gives its handle (VarHandleOp, or the placeholder of a captured variable).
        dtype: TensorFlow's name of the element type.
        shape: static shape, None when unknown.
        trainable: whether it is trained; None when nothing says so.
        initializer: the op that assigns its initial value; None for a captured variable.
        captured: it lives outside the graph, as a tf.Variable of the user.
        shards: the pieces that the graph has instead of it, None where it is whole.
        aliases: of what was a legacy reference variable, the nodes that handed out its buffer instead of a value.
        synchronization: what `tf.Variable(synchronization=...)` declares, in lower case; "" where nothing does.
        aggregation: what `tf.Variable(aggregation=...)` declares, likewise.
    """

    name: str
    handle: str
    dtype: str
    shape: Shape | None
    trainable: bool | None = None
    initializer: str | None = None
    captured: bool = False
    shards: Shards | None = None
    aliases: tuple[str, ...] = ()
    synchronization: str = ""
    aggregation: str = ""

    @property
    def nbytes(self) -> int:
        """Its size; an unknown dimension counts as 1, and a type without a fixed size as 0 bytes."""
        return dtypes.least_bytes(dtypes.NUMBERS.get(self.dtype, 0), self.shape)


@dataclass(frozen=True, eq=False)
class EncodedGraph:
    """The bytes of a GraphDef, which are decoded once, when somebody asks for the graph."""

    data: bytes = field(repr=False)

    @cached_property
    def graph(self) -> Graph:
        """The graph."""
        return serde.from_bytes(self.data)

    @property
    def is_decoded(self) -> bool:
        """Whether somebody has asked for the graph."""
        return "graph" in vars(self)


@dataclass(frozen=True, eq=False, repr=False)
class TrainingGraph:
    """A graph with its training signature. Its graph and its mappings are read-only, too.

    `dataclasses.replace` makes a copy with other fields. Copies share their source, so that no graph is decoded twice.

    Attributes:
        source: the graph, or the bytes of one.
        inputs: by public name.
        outputs: by public name.
        targets: nodes that one step runs for their effect (the train op; the control outputs of a function).
        init_op: the node that initialises everything, if the graph has one.
        variables: by public name.
        keep: nodes that survive a rewrite although no step runs them (saver, table initialisers).
        report: what rewriting did; None for an original.
        binding: what a runtime needs in addition to the graph (captured tf.Variables...); never saved.
        layout: where the values of the folded graph went; None for an original.
        state: variables that rewriting added, by name; each replica has its own (the residuals of compressors).
        notes: what loading has to say: node, op and text; a rewrite puts them into its report.
        stated_placements: what a text or an archive states of values, by their names; None: what the layout says.
        plan_bytes: the encoded plan of the rewrite, as an archive has it; None where the report has it, or nobody.
    """

    source: Graph | EncodedGraph
    inputs: Mapping[str, TensorInfo] = field(default_factory=dict)
    outputs: Mapping[str, TensorInfo] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    init_op: str | None = None
    variables: Mapping[str, Variable] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    report: Any = None
    binding: Any = None
    layout: Any = None
    state: Mapping[str, Variable] = field(default_factory=dict)
    notes: tuple[tuple[str, str, str], ...] = ()
    stated_placements: Annotations | None = None
    plan_bytes: bytes | None = None

    @property
    def placements(self) -> Annotations:
        """How values are spread over the replicas, by their names: those of a rewrite, or what a file states.

        A name that the graph lacks says nothing.
        """
        if self.stated_placements is None:
            return {} if self.layout is None else self.layout.placements
        return self.stated_placements

    @property
    def graph(self) -> Graph:
        """The graph, decoded from the bytes on first use."""
        return self.source.graph if isinstance(self.source, EncodedGraph) else self.source

    @property
    def graph_bytes(self) -> bytes:
        """The encoded GraphDef."""
        return self.source.data if isinstance(self.source, EncodedGraph) else serde.to_bytes(self.source)

    @property
    def graph_def(self) -> Any:  # TensorFlow's class is only known at run time
        """The graph as TensorFlow's GraphDef (this imports TensorFlow)."""
        graph = tensorflow().compat.v1.GraphDef.FromString(self.graph_bytes)
        drop_newer_attrs(graph)
        return graph


class RewrittenTrace(NamedTuple):
    """One trace of something distributed: the graph that was traced, and what it became."""

    original: TrainingGraph
    rewritten: TrainingGraph
