"""Define GraphItem, the class that users work with: a training graph with methods to load, run, save and show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.notebook import NotebookView, table
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    import networkx


# Loaders, runtime and drawing are imported in the methods that call them, so that an item stays cheap.
@dataclass(frozen=True, eq=False, repr=False)
class GraphItem(NotebookView, TrainingGraph):
    """A training graph with its signature, and methods to load, run, save and show it. Treat both as read-only.

    `dataclasses.replace(item, ...)` makes a copy with other fields; `TrainingGraph` documents them.
    """

    @classmethod
    def of(cls, known: TrainingGraph) -> GraphItem:
        """Return a training graph as an item; return an item unchanged."""
        return known if isinstance(known, cls) else cls(**{one.name: getattr(known, one.name) for one in fields(known)})

    def __str__(self) -> str:
        known = isinstance(self.source, Graph) or self.source.is_decoded  # do not decode a graph to print one line
        count = f"{len(self.graph):,} nodes, " if known else ""
        over = f"; rewritten for {self.report.plan.replicas} replicas" if self.report is not None else ""
        named = f"inputs {', '.join(self.inputs) or '-'}; outputs {', '.join(self.outputs) or '-'}"
        return f"{count}{len(self.variables):,} variables; {named}{over}"

    def _html_parts(self) -> Iterator[str]:
        ends = [("input", one) for one in self.inputs.values()] + [("output", one) for one in self.outputs.values()]
        columns = ("", "name", "tensor", "type", "shape", "batch axis")
        yield table(columns, ((k, i.name, i.tensor, i.dtype, i.shape, i.batch_axis) for k, i in ends))
        rows = ((v.name, v.dtype, v.shape, f"{v.nbytes:,}", v.trainable) for v in self.variables.values())
        yield table(("variable", "type", "shape", "#bytes", "trained"), rows)

    def session(self, target: str = "") -> Any:
        """Return a Session on the devices that the graph needs (graph mode).

        Args:
            target: the address of the caller's server (grpc://host:port), whose cluster has the graph's devices.
        """
        from autograph_rewrite.runtime.engine.session import open_session

        return open_session(self, target=target)

    def save(self, path: str | Path) -> None:
        """Write the item as one self-contained file (graph, signature, variables; no pickle)."""
        from autograph_rewrite.load import files

        files.save(self, Path(path))

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """Return the nodes and edges as a networkx graph, with op and device as node attributes."""
        from autograph_rewrite.inspect import export

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
        """Read a .pb, .pbtxt, .meta, .keras file, a SavedModel directory, or what `save` wrote.

        Args:
            path: file or directory.
            train_op: names of the ops that one step runs; default: those of the file, or found in the graph.
            outputs: names of tensors to report.
            init_op: name of the initialiser.
            batch_inputs: axis of the examples by input; None: an input has none.
            signature: the signature to load from a SavedModel.
        """
        from autograph_rewrite.load import files

        named = {"train_op": train_op, "outputs": outputs, "init_op": init_op, "batch_inputs": batch_inputs}
        return cls.of(files.load(Path(path), signature=signature, **named))

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
            train_op: the ops that one step runs; default: found, if there is one candidate.
            outputs: tensors to report.
            init_op: the initialiser; default: found.
            batch_inputs: axis of the examples by input; None: an input has none.
        """
        from autograph_rewrite.load import graphs

        found = graphs.from_graph(graph, train_op=train_op, outputs=outputs, init_op=init_op, batch_inputs=batch_inputs)
        return cls.of(found)

    @classmethod
    def from_function(
        cls, function: Any, *specs: Any, batch_inputs: Mapping[str, int | None] | None = None, **named_specs: Any
    ) -> GraphItem:
        """Trace a tf.function, or a plain function that uses tf.Variables.

        Args:
            function: traced once.
            *specs: `tf.TensorSpec`s or arrays, nested as the function's arguments are.
            batch_inputs: axis of the examples by input; None: an input has none.
            **named_specs: the same for keyword arguments.
        """
        from autograph_rewrite.load import functions

        return cls.of(functions.from_function(function, *specs, batch_inputs=batch_inputs, **named_specs))

    @classmethod
    def from_keras(cls, model: Any, *specs: Any, batch_inputs: Mapping[str, int | None] | None = None) -> GraphItem:
        """Trace the train step of a compiled Keras model on `(x, y[, sample_weight])` specs.

        Args:
            model: built and compiled.
            *specs: `tf.TensorSpec`s or arrays of x, y and sample_weight.
            batch_inputs: axis of the examples by input; None: an input has none.
        """
        from autograph_rewrite.load import keras_models

        return cls.of(keras_models.from_keras(model, *specs, batch_inputs=batch_inputs))
