"""Tells which variable a resource handle refers to, and which ops write it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autograph_rewrite.ir.graph import Node, Use, Value
from autograph_rewrite.ir.traversal import descendants, grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op, get_op
from autograph_rewrite.ops.traits import MERGES, has, ops_with

_FORWARDS = ops_with("forwards_handle")
_DENSE_ARGUMENTS = frozenset(("value", "grad", "delta"))
"""The names, in op definitions, of those inputs of an update that have the variable's shape."""
_OF_ROWS = ("ResourceSparseApply", "ResourceScatter")
ANONYMOUS = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's shared_name for "do not share"


def is_handle(value: Value) -> bool:
    """Tell whether a value is a variable's handle, or a legacy reference to one."""
    return value.dtype == dtypes.RESOURCE or value.dtype > dtypes.REF_OFFSET


def is_update(node: Node) -> bool:
    """Return whether a node writes a variable."""
    return has(node.op, "writes")


def handle_node(value: Value) -> Node:
    """Return the node that makes a handle, followed back through nodes that only forward it.

    Past a Merge, it is the node that makes the handle of every branch; the Merge itself where there are several.
    """
    node = value.node
    while node._inputs and node.op in _FORWARDS:
        if node.op in MERGES:
            return _before_merge(node)
        node = node._inputs[0].node
    return node


def _before_merge(merge: Node) -> Node:
    seen, pending = {merge}, [merge]
    found: dict[Node, None] = {}
    while pending:
        for node in [value.node for value in pending.pop()._inputs]:
            while node._inputs and node.op in _FORWARDS and node not in seen:
                seen.add(node)
                if node.op in MERGES:
                    pending.append(node)
                    break
                node = node._inputs[0].node
            else:
                if node not in seen:
                    found[node] = None
    return next(iter(found)) if len(found) == 1 else merge


def handle_uses(handle: Node) -> Iterator[Use]:
    """Yield the uses of a variable's handle, including those after nodes that only forward it."""
    seen, pending = {handle}, list(handle.read_outputs)
    while pending:
        for use in pending.pop().uses:
            yield use
            if use.node.op in _FORWARDS and use.node not in seen:
                seen.add(use.node)
                pending += use.node.read_outputs


def written(node: Node) -> list[Node]:
    """Return the nodes that make the handles which a node writes: a variable and its slots, or an accumulator."""
    if not (has(node.op, "writes") or node.op == "ResourceAccumulatorApplyGradient") or find_op(node.op) is None:
        return []
    typed = zip(node.inputs, node.input_dtypes, strict=False)
    return [handle_node(value) for value, dtype in typed if dtype == dtypes.RESOURCE or dtype > dtypes.REF_OFFSET]


def updates(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes among `nodes` that write each variable, by the source of its handle."""
    return grouped((handle, node) for node in nodes for handle in written(node))


def variable_dependent_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that are computed from a variable."""
    return descendants(touching_nodes(nodes), controls=False)


def touching_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that read or write a variable, or another resource."""
    return [node for node in nodes if any(value.dtype == dtypes.RESOURCE for value in node.inputs)]


def storage_key(handle: Node) -> tuple[str, str, str]:
    """Return the key of a handle's storage: on one device, handles with equal keys are one variable."""
    shared = handle.attr("shared_name") or handle.name.encode()
    if shared == ANONYMOUS:
        return "anonymous", "", handle.name
    kind = "resource" if handle.op == "VarHandleOp" else "reference"
    return kind, handle.attr("container", b"").decode(), shared.decode()


def updates_rows(node: Node) -> bool:
    """Return whether an update takes rows and their indices."""
    return node.op.startswith(_OF_ROWS)


def rows_argument(op: str) -> int | None:
    """Return the input position of the rows of an update that takes rows and indices; None for another op."""
    if not op.startswith(_OF_ROWS):
        return None
    names = [arg.name for arg in get_op(op).inputs]
    return next((names.index(name) for name in ("grad", "updates") if name in names), None)


def dense_inputs(update: Node) -> list[int]:
    """Return the positions of the inputs of an update that have the variable's shape."""
    return dense_arguments(update.op)


def dense_arguments(op: str) -> list[int]:
    """Return the positions of the inputs of an update op that have the variable's shape."""
    if op.startswith(_OF_ROWS):
        return []
    return [i for i, arg in enumerate(get_op(op).inputs) if arg.name in _DENSE_ARGUMENTS]
