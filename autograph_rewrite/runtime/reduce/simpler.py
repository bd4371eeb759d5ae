"""Simpler nodes: an operand in the place of a node, a plain subtraction in the place of an optimizer.

Minimum(x, limit) ► x            ResourceApplyMomentum(w, slot, rate, gradient, momentum) ► AssignSub(w, gradient)
"""

from __future__ import annotations

from dataclasses import replace

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.variable_ops import dense_inputs, is_update
from autograph_rewrite.runtime.bisect.values import has_value, tensor_name
from autograph_rewrite.runtime.reduce.cuts import Known, keep_order, pruned
from autograph_rewrite.training_graph import TrainingGraph

PLAIN = "AssignSubVariableOp"


def with_simpler(item: TrainingGraph, name: str, known: Known) -> TrainingGraph | None:
    """Return a flat item with something simpler in the place of a node; None where there is nothing.

    Args:
        item: flat; it is not changed.
        name: of the node.
        known: of which shape values are.
    """
    graph = item.graph.clone()
    node = graph.nodes[name]
    if is_update(node):
        return _ordered(item, graph) if _is_plain_now(node) else None
    read = [value for value in node.read_outputs if value.uses]
    if len(read) != 1 or not has_value(read[0]):
        return None
    operand = next((value for value in node.inputs if _stands_for(value, read[0], known)), None)
    if operand is None:
        return None
    read[0].replace_all_uses_with(operand)
    for user in node.control_users:
        user.add_control(operand.node)
        user.remove_control(node)
    return _ordered(item, graph)


def _ordered(item: TrainingGraph, graph: Graph) -> TrainingGraph:
    smaller = pruned(replace(item, source=graph))
    keep_order(item.graph, graph)
    return smaller


def _stands_for(operand: Value, value: Value, known: Known) -> bool:
    """Tell whether an operand has the type of a value, and its shape as far as that is known."""
    shapes = {array.shape for one in (operand, value) if (array := known.values.get(tensor_name(one))) is not None}
    return operand.dtype == value.dtype and len(shapes) <= 1


def _is_plain_now(update: Node) -> bool:
    """Let an update subtract what it is given; return whether it did something else before."""
    dense = dense_inputs(update)
    if update.op == PLAIN or len(dense) != 1 or update.read_outputs:
        return False
    kept = (update.inputs[0], update.inputs[dense[0]])
    for key in update.attrs:
        update.drop_attr(key)
    update.op = PLAIN
    update.set_attr("dtype", kept[1].dtype)
    update.set_inputs(kept)
    return True
