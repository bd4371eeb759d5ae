"""A function call becomes the function's body, its nodes named `<call>/<node>`."""

from __future__ import annotations

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types.attrs import FunctionName
from autograph_rewrite.normalize.functions.bodies import Entry, is_invariant
from autograph_rewrite.normalize.functions.lowering import Lowering
from autograph_rewrite.ops.traits import has


def lower_call(state: Lowering, node: Node, pivot: Node | None) -> None:
    """Replace a function call by the function's body.

    Args:
        state: the lowering under way.
        node: the call.
        pivot: node that is alive in each iteration of the loop around; None: there is none.
    """
    function = node.attr("f") if has(node.op, "calls") else FunctionName(node.op)
    if pivot is None and state.has_routing and node.inputs:
        pivot = _pivot_of(state.graph, node)
    body = state.body(node, function, "", node.inputs, Entry(node.controls, pivot))
    results = [
        state.gated(node, i, state.tied(node, i, value, pivot), body.effects) for i, value in enumerate(body.returns)
    ]
    state.finish(node, results, body.effects, body.effects or [value.node for value in results] or node.controls)


def _pivot_of(graph: Graph, node: Node) -> Node:
    """Return a node that is alive exactly when a call of the original graph is, and in its frame."""
    value = next((value for value in node.inputs if not is_invariant(value)), node.inputs[0])
    return graph.add("Identity", [value], name=f"{node.name}/pivot", origin=node)
