"""Resolve references to ops and tensors (names or TensorFlow objects) to nodes and values of the graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node, Value


def text_of(reference: Any) -> str:
    """Return the name of a tensor or an op given as text or as TensorFlow's object.

    Raises:
        GraphError: it has no name.
    """
    if isinstance(reference, str):
        return reference.lstrip("^")
    handle = getattr(reference, "handle", None)
    if handle is not None and hasattr(handle, "op"):
        return str(reference.op.name)  # a resource variable, or what assigning to one has returned
    name = getattr(reference, "name", None)
    if not isinstance(name, str):
        raise GraphError(
            f"{reference!r} is not an op or tensor of a graph",
            hint="give its name, or the tf.Operation or tf.Tensor itself",
        )
    return name


def is_tensor(reference: Any) -> bool:
    """Return whether a reference is to a value: a tensor, or what assigning to a variable has returned."""
    if isinstance(reference, str):
        return ":" in reference
    handle = getattr(reference, "handle", None)
    return reference.op is not handle.op if handle is not None else hasattr(reference, "op")


def as_list(references: Any) -> list[Any]:
    """Return one or several references as a list; None is the empty list."""
    if references is None:
        return []
    # A symbolic tensor claims to be iterable, so whatever has a name is one reference.
    single = isinstance(references, str) or hasattr(references, "name")
    return [references] if single or not isinstance(references, Iterable) else list(references)


def find_node(graph: Graph, reference: Any, role: str) -> Node:
    """Return the node that `reference` names; `role` says in an error what it was given as.

    Args:
        graph: where to look.
        reference: name or TensorFlow object.
        role: what it was given as, for the message.

    Raises:
        GraphError: the graph has no such node.
    """
    name = text_of(reference).partition(":")[0]
    try:
        return graph.node(name)
    except GraphError as error:
        raise GraphError(f"{role} '{name}': {error.problem}", hint=error.hint) from None


def find_value(graph: Graph, reference: Any, role: str) -> Value:
    """Return the tensor that `reference` names.

    Args:
        graph: where to look.
        reference: name (`op` or `op:1`) or TensorFlow object.
        role: what it was given as, for the message.

    Raises:
        GraphError: the graph has no such node, or the node no such output.
    """
    name = text_of(reference)
    node = find_node(graph, name, role)
    index = name.partition(":")[2] or "0"
    count = output_count(node)
    if not index.isdigit() or (count is not None and int(index) >= count):
        raise GraphError(
            f"{role} '{name}' is not a tensor: the op gives {count} output(s)",
            node=node,
            hint="an op without outputs is a target: name it as train_op" if count == 0 else None,
        )
    return node.output(int(index))


def output_count(node: Node) -> int | None:
    """Return how many outputs a node gives; None for a call of a library function by its name."""
    from autograph_rewrite.ir.types.opdefs import find_op

    return len(node.output_dtypes) if find_op(node.op) is not None else None


def tensor_name(value: Value) -> str:
    """Return the full name of a tensor, `x:0`."""
    return f"{value.node.name}:{value.index}"
