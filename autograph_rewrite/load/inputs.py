"""Find the inputs of a step, and the axis of each that counts examples.

By default, an input is a batch if it is dense and its dimension 0 is unknown: placeholders, traced arguments, iterator
outputs. All other batches (static, sparse, ragged, queues) must be named in `batch_inputs`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import static_shape
from autograph_rewrite.ir.traversal import traced_back
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.replica_marks import replica_mark
from autograph_rewrite.ops.traits import has, ops_with
from autograph_rewrite.training_graph import TensorInfo

_NEVER_BATCH = frozenset((dtypes.RESOURCE, dtypes.VARIANT))

BatchInputs = Mapping[str, int | None]


def is_fed(node: Node) -> bool:
    """Return whether a node is a placeholder that the caller feeds; marks of replicas (`load.marks`) are not fed."""
    return has(node.op, "placeholders") and not replica_mark(node.name)


def is_drawn(node: Node) -> bool:
    """Return whether a node yields elements of an iterator, directly or through an Optional, as in loops over data."""
    if node.op != "OptionalGetValue":
        return has(node.op, "input_elements")
    return traced_back(node.inputs[0], ops_with("carries")).node.op == "IteratorGetNextAsOptional"


def describe(name: str, value: Value, batch_axis: int | None = None) -> TensorInfo:
    """Return name, type and static shape of a tensor.

    Args:
        batch_axis: the dimension that counts examples; None: there is none.
    """
    dtype = dtypes.dtype_name(dtypes.base(value.dtype))
    return TensorInfo(name, tensor_name(value), dtype, static_shape(value), batch_axis)


def describe_output(graph: Graph, reference: Any) -> TensorInfo:
    """Describe an output; for a resource variable, its value under the variable's name.

    Raises:
        GraphError: the graph does not have the tensor.
    """
    handle = getattr(reference, "handle", None)
    if handle is not None and hasattr(handle, "op") and reference.op is not handle.op:
        reference = reference.graph.as_graph_element(reference)  # the value after an assignment
    value = find_value(graph, reference, "output")
    return describe(value.name, _read_of(value.node) if value.node.op == "VarHandleOp" else value)


def _read_of(handle: Node) -> Value:
    """Return the read that a session uses to fetch a variable: one without control inputs; add it if it is missing."""
    name = f"{handle.name}/Read/ReadVariableOp"
    reads = [use.node for use in handle.output().uses if use.node.op == "ReadVariableOp" and not use.node.controls]
    for read in reads:
        if read.name == name:
            return read.output()
    attrs = {"dtype": handle.attr("dtype")}
    return handle.graph.add("ReadVariableOp", [handle.output()], name=name, device=handle.device, attrs=attrs).output()


def source_values(nodes: Iterable[Node]) -> list[Value]:
    """Return the inputs among nodes: fed placeholders and iterator outputs."""
    found: list[Value] = []
    for node in nodes:
        if is_fed(node):
            found.append(node.output())
        elif has(node.op, "input_elements"):
            found += node.outputs
    return found


def default_axis(info: TensorInfo) -> int | None:
    """Return 0 for a dense input whose dimension 0 is unknown, else None."""
    if dtypes.NUMBERS[info.dtype] in _NEVER_BATCH or not info.shape:
        return None
    return 0 if info.shape[0] is None else None


def graph_inputs(
    graph: Graph, step: set[Node], initial: set[Node], batch_inputs: BatchInputs | None
) -> dict[str, TensorInfo]:
    """Return the inputs of a v1 graph by public name.

    Args:
        initial: the nodes that initialisation runs; an input that only they read is never a batch.
        batch_inputs: axis by name, None for an input that is shared; None for the default.

    Raises:
        GraphError: a name is unknown, or an input does not have the axis or has an unknown rank.
    """
    inputs: dict[str, TensorInfo] = {}
    parts = _parts_of_composites(graph)
    for value in source_values(node for node in graph if node in step or node in initial):
        info = describe(value.name, value)
        if value.node in step and only_excludes(batch_inputs) and value.node.name not in parts:
            info = describe(info.name, value, default_axis(info))
        inputs[info.name] = info
    for reference, axis in (batch_inputs or {}).items():
        value = _batch_value(graph, reference, inputs)
        inputs[value.name] = checked(describe(value.name, value, axis))
    return inputs


def only_excludes(batch_inputs: BatchInputs | None) -> bool:
    """Return whether `batch_inputs` only names inputs that are no batches; then the default applies to all others."""
    return all(axis is None for axis in (batch_inputs or {}).values())


def _parts_of_composites(graph: Graph) -> set[str]:
    """Return the placeholders that are parts of sparse or ragged ones, whose dimension 0 does not count examples.

    tf.compat.v1.sparse_placeholder makes `ids/indices`, `ids/values` and `ids/shape`; tf.compat.v1.ragged.placeholder
    makes `ids/flat_values`, `ids/row_splits_0` and so on.
    """
    below: dict[str, dict[str, str]] = {}
    for node in graph:
        if is_fed(node):
            scope, _, last = node.name.rpartition("/")
            below.setdefault(scope, {})[_LAST.sub("", last)] = node.name
    parts: set[str] = set()
    for scope, names in below.items():
        sparse, ragged = {"indices", "values"} <= names.keys(), {"flat_values", "row_splits"} <= names.keys()
        if scope and sparse and _is_index_matrix(graph.nodes[names["indices"]]):
            parts |= {names[part] for part in ("indices", "values", "shape") if part in names}
        elif ragged:
            parts |= {node.name for node in graph if is_fed(node) and node.name.rpartition("/")[0] == scope}
    return parts


_LAST = re.compile(r"_\d+$")


def _is_index_matrix(node: Node) -> bool:
    shape = static_shape(node.output())
    return dtypes.base(node.output().dtype) == dtypes.INT64 and shape is not None and len(shape) == 2


def _batch_value(graph: Graph, reference: str, inputs: Mapping[str, TensorInfo]) -> Value:
    try:
        return find_value(graph, reference, "batch input")
    except GraphError as error:
        hint = error.hint or f"inputs: {', '.join(list(inputs)[:10]) or 'none'}"
        raise GraphError(error.problem, hint=hint) from None


def named_batches(
    inputs: Mapping[str, TensorInfo], batch_inputs: BatchInputs | None, composite: Collection[str] = ()
) -> dict[str, TensorInfo]:
    """Return inputs with their batch axes, as named or by default.

    A name may also be that of a whole structure: "x" for "x/image" and "x/mask". `composite` lists parts of sparse and
    ragged tensors, whose dimension 0 is not the batch; every replica has them whole.

    Args:
        batch_inputs: axis by name; empty or None: dimension 0 of all inputs in which it is unknown.

    Raises:
        GraphError: a name is unknown, or an input does not have the axis or has an unknown rank.
    """
    default = {
        name: replace(info, batch_axis=None if name in composite else default_axis(info))
        for name, info in inputs.items()
    }
    if not batch_inputs:
        return default
    axes: dict[str, int | None] = {}
    if only_excludes(batch_inputs):
        axes = {name: info.batch_axis for name, info in default.items()}
    for reference, axis in batch_inputs.items():
        name = reference.removesuffix(":0")
        below = [name] if name in inputs else [known for known in inputs if known.startswith(f"{name}/")]
        if not below:
            import difflib

            close = difflib.get_close_matches(name, list(inputs), n=3) or list(inputs)[:10]
            raise GraphError(f"batch input '{name}' is not an input", hint=f"inputs: {', '.join(close)}")
        # A sparse or ragged tensor cannot be split: its rows, values and limits have different sizes.
        axes |= dict.fromkeys((one for one in below if one == name or one not in composite), axis)
    return {name: checked(replace(info, batch_axis=axes.get(name))) for name, info in inputs.items()}


def checked(info: TensorInfo) -> TensorInfo:
    """Return `info` with a non-negative batch axis.

    Raises:
        GraphError: the input has no such axis, or its rank is unknown.
    """
    if info.batch_axis is None:
        return info
    if info.shape is None:
        raise GraphError(
            f"the batch input '{info.name}' has an unknown rank",
            where=info.tensor,
            hint="give its placeholder a shape, for example (None, 3); only the dimensions may be unknown",
        )
    axis = info.batch_axis + len(info.shape) if info.batch_axis < 0 else info.batch_axis
    if not 0 <= axis < len(info.shape):
        raise GraphError(
            f"the batch input '{info.name}' has no axis {info.batch_axis}: its shape is {info.shape}", where=info.tensor
        )
    return replace(info, batch_axis=axis)


# Resolve references (names or TensorFlow objects) to nodes and values of the graph.


def text_of(reference: Any) -> str:
    """Return the name of a tensor or op that is given as text or as a TensorFlow object.

    Raises:
        GraphError: the object has no name.
    """
    if isinstance(reference, str):
        return reference.lstrip("^")
    handle = getattr(reference, "handle", None)
    if handle is not None and hasattr(handle, "op"):
        return str(reference.op.name)  # a resource variable, or the result of an assignment to one
    name = getattr(reference, "name", None)
    if not isinstance(name, str):
        raise GraphError(
            f"{reference!r} is not an op or tensor of a graph",
            hint="give its name, or the tf.Operation or tf.Tensor itself",
        )
    return name


def is_tensor(reference: Any) -> bool:
    """Return whether a reference is to a value: a tensor, or the result of an assignment to a variable."""
    if isinstance(reference, str):
        return ":" in reference
    handle = getattr(reference, "handle", None)
    return reference.op is not handle.op if handle is not None else hasattr(reference, "op")


def as_list(references: Any) -> list[Any]:
    """Return one or several references as a list; None is the empty list."""
    if references is None:
        return []
    # A symbolic tensor claims to be iterable, so an object with a name counts as one reference.
    single = isinstance(references, str) or hasattr(references, "name")
    return [references] if single or not isinstance(references, Iterable) else list(references)


def find_node(graph: Graph, reference: Any, role: str) -> Node:
    """Return the node that `reference` names; errors name its `role`.

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
        reference: name (`op` or `op:1`) or TensorFlow object.

    Raises:
        GraphError: the node or the output does not exist.
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
    """Return the number of a node's outputs; None for a call of a library function by its name."""
    from autograph_rewrite.ir.types.opdefs import find_op

    return len(node.output_dtypes) if find_op(node.op) is not None else None


def tensor_name(value: Value) -> str:
    """Return the full name of a tensor, `x:0`."""
    return f"{value.node.name}:{value.index}"
