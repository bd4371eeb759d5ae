"""GraphItem: a graph with its training signature (inputs, outputs, targets, variables).

An item is a value: rewriting makes a new one and never changes the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.format.annotations import Annotations
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.shapes.recorded import Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.notebook import NotebookView, table

if TYPE_CHECKING:
    import networkx

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
        devices: where they live, in order, of one replica behind another where each has its own; empty where every
            replica's device, or the first, has all of them.
        within: how each piece is cut again, None where it is not; empty: none is.
    """

    axis: int
    sizes: tuple[int, ...]
    handles: tuple[str, ...]
    devices: tuple[str, ...] = ()
    within: tuple[Shards | None, ...] = ()

    @property
    def count(self) -> int:
        """How many pieces there are, with those of pieces."""
        return sum(1 if one is None else one.count for one in self.within or (None,) * len(self.sizes))

    def cut(self, value: T, split: Callable[[T, tuple[int, ...], int], Sequence[T]]) -> list[T]:
        """Return the pieces of a value.

        Args:
            value: the whole.
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

    def of_replica(self, device: str) -> tuple[str, ...]:
        """Return where the pieces of a replica live, which begins with a device."""
        count = self.count
        if not self.devices:
            return (device,) * count
        first = self.devices.index(device) if len(self.devices) > count and device in self.devices else 0
        return self.devices[first : first + count]


@dataclass(frozen=True)
class Variable:
    """A variable of the graph.

    Attributes:
        name: unique public name.
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


class GraphItem(NotebookView):
    """A training graph with its signature. Treat it, and its graph, as read-only.

    Attributes:
        inputs: by public name.
        outputs: by public name.
        targets: nodes that one step runs for their effect (the train op; the control outputs of a function).
        init_op: the node that initialises everything, if the graph has one.
        variables: by public name.
        keep: nodes that survive a rewrite although no step runs them (saver, table initialisers).
        report: what rewriting did; None for an original.
        binding: what a runtime needs besides the graph (captured tf.Variables...); never saved.
        layout: where the values of the folded graph went; None for an original.
        state: variables that rewriting added, by name; each replica has its own (the residuals of compressors).
        notes: what loading has to say: node, op and text; a rewrite puts them into its report.
        plan_bytes: the encoded plan of the rewrite, as an archive has it; None where the report has it, or nobody.
    """

    def __init__(
        self,
        graph: Graph | None = None,
        inputs: Mapping[str, TensorInfo] | None = None,
        outputs: Mapping[str, TensorInfo] | None = None,
        targets: Sequence[str] = (),
        init_op: str | None = None,
        variables: Mapping[str, Variable] | None = None,
        *,
        keep: Sequence[str] = (),
        report: Any = None,
        binding: Any = None,
        layout: Any = None,
        state: Mapping[str, Variable] | None = None,
        notes: Sequence[tuple[str, str, str]] = (),
        placements: Annotations | None = None,
        plan_bytes: bytes | None = None,
        data: bytes | None = None,
    ) -> None:
        """Make an item of a graph, or of the bytes of its GraphDef (`data`), which are then read when needed.

        Args:
            graph: read and not copied.
            inputs: by public name.
            outputs: by public name.
            targets: names of nodes that one step runs for their effect.
            init_op: name of the node that initialises everything.
            variables: by public name.
            keep: names of nodes that survive a rewrite although no step runs them.
            report: what rewriting did.
            binding: what a runtime needs besides the graph.
            layout: where the values of the folded graph went.
            state: variables that rewriting added, by name.
            notes: of loading: node, op and text of each.
            placements: what a text or an archive states of values, by their names; None: what the layout says.
            plan_bytes: the encoded plan of the rewrite, from an archive.
            data: bytes of a GraphDef, in place of `graph`.
        """
        if graph is None and data is None:
            raise GraphError("a GraphItem needs a graph or the bytes of one")
        self._graph = graph
        self._data = data
        self.inputs = dict(inputs or {})
        self.outputs = dict(outputs or {})
        self.targets = tuple(targets)
        self.init_op = init_op
        self.variables = dict(variables or {})
        self.keep = tuple(keep)
        self.report = report
        self.binding = binding
        self.layout = layout
        self.state = dict(state or {})
        self.notes = tuple(notes)
        self._placements = placements
        self.plan_bytes = plan_bytes

    @property
    def placements(self) -> Annotations:
        """How values are spread over the replicas, by their names: those of a rewrite, or what a file states.

        A name that the graph lacks says nothing.
        """
        if self._placements is None:
            return {} if self.layout is None else self.layout.placements
        return self._placements

    @property
    def graph(self) -> Graph:
        """The graph, decoded from the bytes on first use."""
        if self._graph is None:
            self._graph = serde.from_bytes(self._data or b"")
        return self._graph

    @property
    def graph_bytes(self) -> bytes:
        """The encoded GraphDef."""
        return self._data if self._data is not None else serde.to_bytes(self.graph)

    @property
    def graph_def(self) -> Any:  # TensorFlow's class is only known at run time
        """The graph as TensorFlow's GraphDef (this imports TensorFlow)."""
        from tensorflow.core.framework import graph_pb2

        return graph_pb2.GraphDef.FromString(self.graph_bytes)

    def __str__(self) -> str:
        count = f"{len(self._graph):,} nodes, " if self._graph is not None else ""
        over = f"; rewritten for {self.report.plan.replicas} replicas" if self.report is not None else ""
        named = f"inputs {', '.join(self.inputs) or '-'}; outputs {', '.join(self.outputs) or '-'}"
        return f"{count}{len(self.variables):,} variables; {named}{over}"

    def _html_parts(self) -> Iterator[str]:
        ends = [("input", one) for one in self.inputs.values()] + [("output", one) for one in self.outputs.values()]
        columns = ("", "name", "tensor", "type", "shape", "batch axis")
        yield table(columns, ((k, i.name, i.tensor, i.dtype, i.shape, i.batch_axis) for k, i in ends))
        rows = ((v.name, v.dtype, v.shape, f"{v.nbytes:,}", v.trainable) for v in self.variables.values())
        yield table(("variable", "type", "shape", "#bytes", "trained"), rows)

    def with_(self, **changes: Any) -> GraphItem:
        """Return a copy with some attributes replaced; a new `graph` or `data` replaces both."""
        if "graph" not in changes and "data" not in changes:
            changes |= {"graph": self._graph, "data": self._data}
        changes = {"placements": self._placements, **changes}
        kept = (
            *("inputs", "outputs", "targets", "init_op", "variables", "keep"),
            *("report", "binding", "layout", "state", "notes", "plan_bytes"),
        )
        return GraphItem(**({name: getattr(self, name) for name in kept} | changes))

    def session(self, target: str = "") -> Any:
        """Return a Session on the devices that the graph needs (graph mode).

        Args:
            target: a server of the caller's own (grpc://host:port) whose cluster has the devices, as those of stages.
        """
        from autograph_rewrite.runtime.session import session

        return session.open_session(self, target=target)

    def save(self, path: str | Path) -> None:
        """Write the item as one self-contained file (graph, signature, variables; no pickle)."""
        from autograph_rewrite.load.sources import archive

        archive.save(self, Path(path))

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """Return the nodes and edges as a networkx graph, with op and device as node attributes."""
        from autograph_rewrite.inspect.render import export

        return export.to_networkx(self.graph)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        train_op: str | Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        init_op: str | None = None,
        batch_inputs: Mapping[str, int | None] | None = None,
        signature: str | None = None,
    ) -> GraphItem:
        """Read a .pb, .pbtxt, .meta, SavedModel directory, or what `save` wrote.

        Args:
            path: file or directory.
            train_op: names of what one step runs; left out: what the file says, or what is found.
            outputs: names of tensors to report.
            init_op: name of the initialiser.
            batch_inputs: axis of the examples by input; None: an input has none.
            signature: which one of a SavedModel.
        """
        from autograph_rewrite.load.sources import files

        with no_garbage_collection():
            return files.load(
                Path(path),
                train_op=train_op,
                outputs=outputs,
                init_op=init_op,
                batch_inputs=batch_inputs,
                signature=signature,
            )

    @classmethod
    def from_graph(
        cls,
        graph: Any,
        *,
        train_op: Any = None,
        outputs: Sequence[Any] = (),
        init_op: Any = None,
        batch_inputs: Mapping[str, int | None] | None = None,
    ) -> GraphItem:
        """Wrap a tf.Graph, GraphDef or MetaGraphDef; ops and tensors are given by name or as TensorFlow objects.

        Args:
            graph: tf.Graph, GraphDef, its bytes, or MetaGraphDef.
            train_op: what one step runs; left out: found where there is one candidate.
            outputs: tensors to report.
            init_op: the initialiser; left out: found.
            batch_inputs: axis of the examples by input; None: an input has none.
        """
        from autograph_rewrite.load.sources import graphs

        with no_garbage_collection():
            return graphs.from_graph(
                graph, train_op=train_op, outputs=outputs, init_op=init_op, batch_inputs=batch_inputs
            )

    @classmethod
    def from_function(
        cls, function: Any, *specs: Any, batch_inputs: Mapping[str, int | None] | None = None, **named_specs: Any
    ) -> GraphItem:
        """Trace a tf.function, or a plain function that uses tf.Variables.

        Args:
            function: what is traced.
            *specs: `tf.TensorSpec`s or arrays, nested as its arguments are.
            batch_inputs: axis of the examples by input; None: an input has none.
            **named_specs: the same for keyword arguments.
        """
        from autograph_rewrite.load.sources import functions

        return functions.from_function(function, *specs, batch_inputs=batch_inputs, **named_specs)

    @classmethod
    def from_keras(cls, model: Any, *specs: Any, batch_inputs: Mapping[str, int | None] | None = None) -> GraphItem:
        """Trace the train step of a compiled Keras 3 model on `(x, y[, sample_weight])` specs.

        Args:
            model: built and compiled.
            *specs: `tf.TensorSpec`s or arrays of x, y and sample_weight.
            batch_inputs: axis of the examples by input; None: an input has none.
        """
        from autograph_rewrite.load.sources import keras_models

        return keras_models.from_keras(model, *specs, batch_inputs=batch_inputs)


class RewrittenTrace(NamedTuple):
    """One trace of something distributed: the item that was traced, and what it became."""

    original: GraphItem
    rewritten: GraphItem
