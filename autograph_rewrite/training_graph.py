"""Define TrainingGraph: a graph with its training signature (inputs, outputs, targets, variables).

It is a value: rewriting makes a new one and never changes the old one. `item.GraphItem` adds the methods for users.
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
        axis: the axis along which the pieces are joined.
        sizes: of the pieces along `axis`.
        handles: names of the nodes that give the pieces' handles, in order; for a piece that is cut again, those of its
            pieces.
        devices: where the pieces live, in order; if each replica has a copy, one replica after another. Empty if every
            replica's device, or the first one, has all pieces.
        within: how each piece is cut again, None for a piece that is not; empty if no piece is.
        elsewhere: the numbers of the pieces that other workers hold and write.
        copies: the handles of each replica, where the pieces are the instances of one node.
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
        """How many pieces there are; a piece that is cut again counts as its pieces."""
        return sum(1 if one is None else one.count for one in self.within or (None,) * len(self.sizes))

    def cut(self, value: T, split: Callable[[T, tuple[int, ...], int], Sequence[T]]) -> list[T]:
        """Cut a value into pieces, in the order of the handles.

        Args:
            split: called with a value, the sizes and the axis.
        """
        found: list[T] = []
        parts = split(value, self.sizes, self.axis)
        for part, one in zip(parts, self.within or (None,) * len(self.sizes), strict=True):
            found += [part] if one is None else one.cut(part, split)
        return found

    def join(self, pieces: Sequence[T], concat: Callable[[list[T], int], T]) -> T:
        """Join pieces to the whole value.

        Args:
            pieces: in the order of the handles.
            concat: called with values and the axis.
        """
        parts, rest = [], list(pieces)
        for one in self.within or (None,) * len(self.sizes):
            own, rest = (rest[:1], rest[1:]) if one is None else (rest[: one.count], rest[one.count :])
            parts.append(own[0] if one is None else one.join(own, concat))
        return concat(parts, self.axis)

    def places(self, copy: int, device: str) -> tuple[str, ...]:
        """Return the device of each piece of one copy of the variable.

        Args:
            copy: its number; if `devices` lists one copy only, all copies are on those devices.
            device: of a copy whose pieces are all in one place (`devices` is empty).
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
        trainable: whether it is trained; None if the graph does not say.
        initializer: the op that assigns its initial value; None for a captured variable.
        captured: it lives outside the graph, as a tf.Variable of the user.
        shards: the pieces that the graph has instead of it, None if it is whole.
        aliases: of a former reference variable, the nodes that gave out its buffer instead of a value.
        synchronization: the argument of `tf.Variable(synchronization=...)`, in lower case; "" without one.
        aggregation: the argument of `tf.Variable(aggregation=...)`, likewise.
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
        """Its size; an unknown dimension counts as 1, and an element of a type without a fixed size as 0 bytes."""
        return dtypes.least_bytes(dtypes.NUMBERS.get(self.dtype, 0), self.shape)


@dataclass(frozen=True, eq=False)
class EncodedGraph:
    """The bytes of a GraphDef, decoded once, at the first use of `graph`."""

    data: bytes = field(repr=False)

    @cached_property
    def graph(self) -> Graph:
        """The decoded graph."""
        return serde.from_bytes(self.data)

    @property
    def is_decoded(self) -> bool:
        """Whether the graph has been decoded."""
        return "graph" in vars(self)


@dataclass(frozen=True, eq=False, repr=False)
class TrainingGraph:
    """A graph with its training signature. Its graph and its mappings are read-only, too.

    `dataclasses.replace` makes a copy with other fields. Copies share their source, so a graph is decoded only once.

    Attributes:
        source: the graph, or its bytes.
        inputs: by public name.
        outputs: by public name.
        targets: nodes that one step runs for their effect (the train op; the control outputs of a function).
        init_op: the node that initialises everything, if the graph has one.
        variables: by public name.
        keep: nodes that survive a rewrite although no step runs them (saver, table initialisers).
        report: the report of the rewrite; None for an original.
        binding: objects that a runtime needs in addition to the graph (captured tf.Variables...); never saved.
        layout: where the expanded graph has the values of the folded graph; None for an original.
        state: variables that the rewrite added, one per replica, by name (the residuals of compressors).
        notes: notes of the loader: node, op and text; a rewrite puts them into its report.
        stated_placements: placements of values that a text or an archive states, by value name; None: those of
            `layout`.
        plan_bytes: the encoded plan of the rewrite, read from an archive; None if the report has the plan, or there is
            no plan.
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
        """Placements of values by their names: those of a rewrite, or those that a file states.

        They may include names that the graph lacks.
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
    def graph_def(self) -> Any:  # the class is not known without importing TensorFlow
        """The graph as TensorFlow's GraphDef (this imports TensorFlow)."""
        graph = tensorflow().compat.v1.GraphDef.FromString(self.graph_bytes)
        drop_newer_attrs(graph)
        return graph


class RewrittenTrace(NamedTuple):
    """One trace of a distributed function or model: the traced graph and its rewrite."""

    original: TrainingGraph
    rewritten: TrainingGraph
