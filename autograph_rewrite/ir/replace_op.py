"""Replaces a node but keeps its name valid: turns it into another op, or renames another node to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types.opdefs import get_op


def become(node: Node, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any]) -> None:
    """Change op, inputs and attributes of a node; control edges, device and `_x` attributes stay.

    Raw bytes in `attrs` are stored unchanged; attributes that the new op does not declare are dropped.
    """
    declared = get_op(op).attrs
    node.op = op
    node.set_inputs(inputs)
    for key in list(node.attrs):
        if key not in declared and not key.startswith("_"):
            node.drop_attr(key)
    for key, value in attrs.items():
        if isinstance(value, bytes) and declared[key].kind != "string":
            node.set_raw_attr(key, value)
        else:
            node.set_attr(key, value)
    node.drop_outputs()


def take_name(graph: Graph, node: Node, name: str) -> None:
    """Rename `node`.

    Raises:
        GraphError: another node has the name.
    """
    if name in graph.nodes:
        raise GraphError(f"the name '{name}' is taken", node=graph.nodes[name])
    del graph.nodes[node.name]
    node.name = name
    graph.nodes[name] = node
    graph.edits += 1


def replace_outputs(graph: Graph, node: Node, results: Mapping[int, Value]) -> None:
    """Replace the outputs of `node` by `results`, and erase it; a single result also takes its name.

    Args:
        results: by output index.
    """
    for control in node.controls:
        for value in results.values():
            value.node.add_control(control)
    for index, value in results.items():
        node.output(index).replace_all_uses_with(value)
    for user in node.control_users:
        user.remove_control(node)
        for value in results.values():
            user.add_control(value.node)
    name = node.name
    graph.erase(node)
    if len(results) == 1:
        (value,) = results.values()
        take_name(graph, value.node, name)
