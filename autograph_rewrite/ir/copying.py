"""Copies a node: the same op, attributes, span and place; new operands and provenance."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autograph_rewrite.ir.attr_inference import provenance
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import Select, is_rarer


def copy_node(
    graph: Graph,
    node: Node,
    inputs: Iterable[Value],
    *,
    name: str,
    controls: Iterable[Node] = (),
    op: str = "",
    without: Collection[str] = (),
) -> Node:
    """Add a copy of a node.

    Args:
        node: may be of another graph.
        op: another op type that takes the same attributes; empty for the same.
        without: attributes that are not copied.
    """
    attrs = {key: raw for key, raw in node.attrs.items() if key not in without}
    if graph.current_pass:
        attrs |= provenance(graph.current_pass, node)
    copy = Node(graph, graph.unique_name(name), op or node.op, node.device, attrs, node.rest)
    copy.span, copy.place = node.span, node.place
    return graph.insert(copy, inputs, controls)


def select_first(node: Node) -> None:
    """Let a node read the first instance of each operand that runs more often than the node."""
    inputs = node.inputs
    finer = [i for i, value in enumerate(inputs) if is_rarer(node.span, value.node.span)]
    node.set_inputs(inputs, {i: node.selects.get(i, Select.FIRST) for i in finer})
