"""Look through the Optionals in which the gradient of a `tf.cond` keeps what only one branch has computed.

    OptionalFromValue(v) ─► Merge(with OptionalNone) ─► Switch ─► OptionalGetValue   becomes   v ─► Switch

`v` is alive exactly when its branch was taken, and where it was not, OptionalGetValue could not have run. What lies
between Merge and OptionalGetValue only routes the Optional; the same route, laid for `v`, carries the value itself.
An Optional that goes around a loop, or through a list, stays.
"""

from __future__ import annotations

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Graph, Node, Value

_ROUTE = frozenset(("Switch", "Identity", "Enter"))


def look_through(graph: Graph) -> None:
    """Replace every OptionalGetValue whose value is found by that value, in place."""
    laid: dict[tuple[Value, int], Value] = {}
    for node in list(graph):
        if node.op != "OptionalGetValue":
            continue
        route = _route(node.inputs[0])
        if route is None:
            continue
        path, source = route
        for out in node.read_outputs:
            if out.uses:
                value = source.inputs[out.index]
                out.replace_all_uses_with(_lay(graph, value, path, laid, out.index))


def _route(value: Value) -> tuple[list[Value], Node] | None:
    """Return the routing values between an Optional and where it was made, the last one first; and that node."""
    path: list[Value] = []
    while value.node.op in _ROUTE:
        path.append(value)
        value = value.node.inputs[0]
    if value.node.op == "OptionalFromValue":
        return path, value.node
    if value.node.op != "Merge" or value.index != 0:
        return None
    made = [_through_identities(one).node for one in value.node.inputs]
    sources = [node for node in made if node.op == "OptionalFromValue"]
    if len(sources) != 1 or any(node.op not in ("OptionalFromValue", "OptionalNone") for node in made):
        return None
    return path, sources[0]


def _through_identities(value: Value) -> Value:
    while value.node.op == "Identity":
        value = value.node.inputs[0]
    return value


def _lay(graph: Graph, value: Value, path: list[Value], laid: dict[tuple[Value, int], Value], part: int) -> Value:
    """Copy a route for `value`; routes that share their beginning share the copies."""
    for step in reversed(path):
        key = (step, part)
        if key not in laid:
            node = step.node
            attrs = {k: raw for k, raw in node.attrs.items() if k not in ("T", "_output_shapes")}
            copy = Node(graph, graph.unique_name(f"{node.name}/value"), node.op, node.device, attrs, node.rest)
            graph.insert(copy, [value, *node.inputs[1:]], node.controls)
            copy.set_attr("T", dtypes.base(value.dtype))
            for index in range(len(copy.output_dtypes)):
                laid[node.output(index), part] = copy.output(index)
        value = laid[key]
    return value
