"""Find the variables of a graph: their handles and initialisers, and the variables that a function captures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import storage_key
from autograph_rewrite.load.marks import CHECKPOINTS
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import Variable


def find_variables(graph: Graph, collected: Collected, init_op: str | None, step: set[Node]) -> dict[str, Variable]:
    """Return the variables of a graph by public name (the handle's node name), one per storage.

    Args:
        init_op: the op that initialises everything, if known.
        step: the nodes that a step runs; an assignment among them is an update, not an initializer.
    """
    handles: dict[tuple[str, str, str], Node] = {}
    for node in graph:
        if has(node.op, "variables"):
            handles.setdefault(storage_key(node), node)
    initial = ancestors([graph.node(init_op)]) if init_op is not None else set()
    found = {}
    for handle in handles.values():
        synchronization, aggregation = collected.policies.get(handle.name, ("", ""))
        found[handle.name] = Variable(
            name=handle.name,
            handle=handle.name,
            dtype=dtypes.dtype_name(handle.attr("dtype")),
            shape=handle.attr("shape"),
            trainable=None if collected.trainable is None else handle.name in collected.trainable,
            initializer=_initializer(handle, graph, collected, initial, step),
            synchronization=synchronization,
            aggregation=aggregation,
        )
    return found


def _initializer(handle: Node, graph: Graph, collected: Collected, initial: set[Node], step: set[Node]) -> str | None:
    known = collected.initializers.get(handle.name)
    if known is not None and known in graph:
        return known
    assigns = [use.node for use in handle.output().uses if use.index == 0 and has(use.node.op, "assigns")]
    for assign in assigns:
        if assign in initial:
            return assign.name
    for assign in assigns:
        if assign.name == f"{handle.name}/Assign":
            return assign.name
    candidates = [assign for assign in assigns if assign not in step and not _restores(assign)]
    return candidates[0].name if len(candidates) == 1 else None


def _restores(assign: Node) -> bool:
    """Return whether an assignment loads a checkpoint: its value comes from RestoreV2, directly or through one op."""
    source = assign.inputs[1].node
    return source.op == "RestoreV2" or any(value.node.op == "RestoreV2" for value in source.inputs)


def merge_handles(graph: Graph) -> None:
    """Make all readers of a variable read one handle: equal shared names on one device are one storage."""
    first: dict[tuple[str, ...], Node] = {}
    for node in graph:
        if node.op != "VarHandleOp":
            continue
        handle = first.setdefault((*storage_key(node), node.device), node)
        if handle is not node:
            node.output().replace_all_uses_with(handle.output())


# The collections of a TensorFlow v1 graph: variables, their initializers, train ops, checkpoints.


@dataclass(frozen=True)
class Collected:
    """Facts from collections, all by node name.

    Attributes:
        trainable: handles of trainable variables; None when no collection lists variables.
        initializers: handle -> the op that initialises it.
        train_ops: ops that optimizers registered as train ops.
        update_ops: ops that layers registered to be run with each step.
        keep: nodes that the program runs besides the step (saver, table initialisers).
        checkpoints: nodes whose values rematerialisation keeps.
        policies: handle -> the synchronization and aggregation that the variable declares.
    """

    trainable: frozenset[str] | None = None
    initializers: Mapping[str, str] = field(default_factory=dict)
    train_ops: tuple[str, ...] = ()
    update_ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    policies: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def from_tf_graph(graph: Any) -> Collected:
    """Read the collections of a tf.Graph; any code may add to one, so entries of unexpected types are ignored."""
    variables = [v for key in ("variables", "local_variables") for v in graph.get_collection(key)]
    trainable = graph.get_collection("trainable_variables")
    by_name = {name: v for v in (*variables, *trainable) if (name := _op_name(v)) is not None}
    initializers = {name: getattr(variable, "initializer", None) for name, variable in by_name.items()}
    return Collected(
        trainable=frozenset(filter(None, map(_op_name, trainable))) if variables or trainable else None,
        initializers={name: one.name for name, one in initializers.items() if one is not None},
        train_ops=_names(graph, "train_op"),
        update_ops=_names(graph, "update_ops"),
        keep=_names(graph, "table_initializer"),
        checkpoints=_names(graph, CHECKPOINTS),
        policies={
            name: (declared(variable, "synchronization"), declared(variable, "aggregation"))
            for name, variable in by_name.items()
        },
    )


def declared(variable: Any, what: str) -> str:
    """Return the synchronization or aggregation of a tf.Variable, in lower case; "" for the default.

    Args:
        what: "synchronization" or "aggregation".
    """
    name = str(getattr(getattr(variable, what, None), "name", "")).lower()
    return "" if name in ("auto", "none") else name


def _names(graph: Any, collection: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(_name, graph.get_collection(collection)))))


def _op_name(variable: Any) -> Any:
    return getattr(getattr(variable, "op", None), "name", None)


def _name(entry: Any) -> str | None:
    name = entry if isinstance(entry, str) else getattr(entry, "name", None)
    return name.partition(":")[0] if isinstance(name, str) else None


# Captures of a traced function, which are placeholders of its graph: live objects, or values saved to a file.


@dataclass(frozen=True)
class Capture:
    """A value from outside that a function uses.

    Attributes:
        node: its placeholder.
        value: the eager tensor: a handle of a variable or another resource, or a large constant.
        variable: the tf.Variable whose handle it is, else None.
        name: the variable's public name, else None.
    """

    node: str
    value: Any
    variable: Any = None
    name: str | None = None


@dataclass(frozen=True, eq=False)
class FunctionBinding:
    """How to call a graph that was traced from a function.

    Attributes:
        concrete: TensorFlow's ConcreteFunction; None if it was restored from a file.
        captures: in capture order.
        structured_outputs: the nested result, tensors of the traced graph.
        inputs: placeholder node per flat argument, in order.
        outputs: tensor name per flat result, in order.
    """

    concrete: Any
    captures: tuple[Capture, ...]
    structured_outputs: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    owner: Any = None  # keeps the objects of captured handles alive
    first: Any = None  # the function's earlier trace (`functions.first_trace`), which has other captures


@dataclass(frozen=True, eq=False)
class SavedCapture:
    """The value of a capture when its item was saved.

    Attributes:
        node: its placeholder.
        dtype: TensorFlow's name of the element type.
        name: the variable's public name; None for a constant.
    """

    node: str
    value: Any
    dtype: str
    name: str | None = None

    def __eq__(self, other: object) -> bool:
        """Compare by value."""
        if not isinstance(other, SavedCapture):
            return NotImplemented
        if (self.node, self.dtype, self.name) != (other.node, other.dtype, other.name):
            return False
        return bool(self.value.shape == other.value.shape and self.value.tolist() == other.value.tolist())

    __hash__ = None  # type: ignore[assignment]  # arrays have none


@dataclass(frozen=True)
class SavedBinding:
    """A function's captures by value, from which it can run again on new variables.

    Attributes:
        captures: in capture order.
        inputs: placeholder node per flat argument, in order.
        outputs: tensor name per flat result, in order.
    """

    captures: tuple[SavedCapture, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def restore(self, trainable: Collection[str] = ()) -> FunctionBinding:
        """Return a live binding with a new tf.Variable per captured variable (this imports TensorFlow)."""
        import tensorflow as tf

        captures = []
        for saved in self.captures:
            if saved.name is None:
                captures.append(Capture(saved.node, tf.constant(saved.value, saved.dtype)))
                continue
            variable = tf.Variable(saved.value, dtype=saved.dtype, name=saved.name, trainable=saved.name in trainable)
            captures.append(Capture(saved.node, variable.handle, variable, saved.name))
        return FunctionBinding(None, tuple(captures), None, self.inputs, self.outputs)
