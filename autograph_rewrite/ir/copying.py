"""The one way to copy a node: the same op and attributes, other operands, and where it came from."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autograph_rewrite.ir.build import provenance
from autograph_rewrite.ir.fold import Span
from autograph_rewrite.ir.graph import Graph, Node, Value


def copy_node(
    graph: Graph,
    node: Node,
    inputs: Iterable[Value],
    *,
    name: str,
    controls: Iterable[Node] = (),
    op: str = "",
    span: Span = Span.ONCE,
    without: Collection[str] = (),
) -> Node:
    """Add a copy of a node.

    Args:
        graph: where it goes.
        node: what is copied; it may be of another graph.
        inputs: the values that the copy reads.
        name: wanted name; made unique.
        controls: nodes that must run before it.
        op: another op type that takes the same attributes.
        span: how often it runs.
        without: attributes that it does not get.
    """
    attrs = {key: raw for key, raw in node.attrs.items() if key not in without}
    if graph.current_pass:
        attrs |= provenance(graph.current_pass, node.name)
    copy = Node(graph, graph.unique_name(name), op or node.op, node.device, attrs, node.rest)
    copy.span = span
    return graph.insert(copy, inputs, controls)
