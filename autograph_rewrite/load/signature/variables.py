"""Find the variables of a graph: their handles, and the ops that give them their first values."""

from __future__ import annotations

from collections.abc import Iterator

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.load.signature.collections import Collected
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import Variable

ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's shared_name for "do not share"


def resource_key(node: Node) -> tuple[str, str, str]:
    """Return what decides which storage a handle means; handles with equal keys are one variable."""
    shared = node.attr("shared_name", b"").decode() or node.name
    if shared == ANONYMOUS:
        return "", "", node.name
    kind = "ref" if has(node.op, "reference_variables") else "resource"
    return kind, node.attr("container", b"").decode(), shared


def assigns_of(handle: Node) -> Iterator[Node]:
    """Yield the ops that assign a whole new value to a variable."""
    for use in handle.output().uses:
        if use.index == 0 and has(use.node.op, "assigns"):
            yield use.node


def find_variables(graph: Graph, collected: Collected, init_op: str | None, step: set[Node]) -> dict[str, Variable]:
    """Return the variables of a graph by public name (the handle's node name), one per storage.

    Args:
        collected: what collections say.
        init_op: the op that initialises everything, if known.
        step: the nodes that a step runs; an assignment among them is an update, not an initializer.
    """
    handles: dict[tuple[str, str, str], Node] = {}
    for node in graph:
        if has(node.op, "variables"):
            handles.setdefault(resource_key(node), node)
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
    assigns = list(assigns_of(handle))
    for assign in assigns:
        if assign in initial:
            return assign.name
    for assign in assigns:
        if assign.name == f"{handle.name}/Assign":
            return assign.name
    candidates = [assign for assign in assigns if assign not in step and not _restores(assign)]
    return candidates[0].name if len(candidates) == 1 else None


def _restores(assign: Node) -> bool:
    """Whether an assignment loads a checkpoint: its value is RestoreV2's, directly or through one op."""
    source = assign.inputs[1].node
    return source.op == "RestoreV2" or any(value.node.op == "RestoreV2" for value in source.inputs)


def merge_handles(graph: Graph) -> None:
    """Let all readers of one variable read one handle: equal shared names on one device are one storage."""
    first: dict[tuple[str, ...], Node] = {}
    for node in graph:
        if node.op != "VarHandleOp":
            continue
        handle = first.setdefault((*resource_key(node), node.device), node)
        if handle is not node:
            node.output().replace_all_uses_with(handle.output())
