"""Forward values through Optionals, in which the gradient of a `tf.cond` keeps values of one branch.

    OptionalFromValue(v) ─► Merge ─► Switch ─► OptionalGetValue     becomes     v ─► Switch

`v` is alive exactly when its branch was taken. What lies between Merge and OptionalGetValue only routes the Optional;
the same route, laid for `v`, carries the value itself. Which side of the Merge is meant follows from the Switch, when
both were decided by the same predicate; or from the other side, when that is OptionalNone and could not be read.
An Optional that goes around a loop, or through a list, stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autograph_rewrite.ir.copying import Variant, copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import has

_UNTYPED = Variant(without=("T", "_output_shapes"))

Laid = dict[tuple[Value, Value], Value]  # (routing value, what is carried instead) -> its copy


def look_through(graph: Graph, predicates: Mapping[Node, Value]) -> None:
    """Replace every OptionalGetValue whose value is found by that value, in place.

    Args:
        graph: the graph.
        predicates: for each Merge of a lowered `If`, else side first, what decided it.
    """
    laid: Laid = {}
    waiting = [node for node in graph if node.op == "OptionalGetValue"]
    while waiting:
        left = [node for node in waiting if not _replaced(graph, node, predicates, laid)]
        if len(left) == len(waiting):
            return
        waiting = left  # a predicate may itself have come out of an Optional


def _replaced(graph: Graph, node: Node, predicates: Mapping[Node, Value], laid: Laid) -> bool:
    path, end = _route(node.inputs[0])
    source = _source(path, end, predicates)
    if source is None:
        return False
    for out in node.read_outputs:
        if out.uses:
            out.replace_all_uses_with(_lay(graph, source.inputs[out.index], path, laid))
    return True


def _route(value: Value) -> tuple[list[Value], Value]:
    """Return the routing values between an Optional and where it was made, the last one first; and that value."""
    path: list[Value] = []
    while has(value.node.op, "carries"):
        path.append(value)
        value = value.node.inputs[0]
    return path, value


def _source(path: Sequence[Value], end: Value, predicates: Mapping[Node, Value]) -> Node | None:
    """Return the OptionalFromValue that is read at the end of a route, if it is certain."""
    if end.node.op == "OptionalFromValue":
        return end.node
    if end.node.op != "Merge" or end.index != 0:
        return None
    made = [_original(side).node for side in end.node.inputs]
    full = [node for node in made if node.op == "OptionalFromValue"]
    if len(full) == 1 and all(node.op == "OptionalNone" for node in made if node is not full[0]):
        return full[0]
    decided = predicates.get(end.node)
    if decided is None or len(full) != 2:
        return None
    for step in path:
        if step.node.op == "Switch" and _original(step.node.inputs[1]) is _original(decided):
            return full[step.index]
    return None


def _original(value: Value) -> Value:
    """Follow a value back through nodes that only copy it."""
    while value.node.op in ("Switch", "Identity"):
        value = value.node.inputs[0]
    return value


def _lay(graph: Graph, value: Value, path: list[Value], laid: Laid) -> Value:
    """Copy a route for `value`; routes that share their beginning share the copies."""
    carried = value
    for step in reversed(path):
        key = (step, carried)
        if key not in laid:
            node = step.node
            inputs, name = [value, *node.inputs[1:]], f"{node.name}/value"
            copy = copy_node(graph, node, inputs, name=name, controls=node.controls, variant=_UNTYPED)
            copy.set_attr("T", dtypes.base(value.dtype))
            for index in range(len(copy.output_dtypes)):
                laid[node.output(index), carried] = copy.output(index)
        value = laid[key]
    return value
