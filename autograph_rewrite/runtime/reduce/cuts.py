"""Cuts: a training graph without some of its nodes, whose readers get a constant or a fed batch instead.

x ─► MatMul ─► Tanh ─► Sum        without MatMul, Tanh:     cut ─► Sum      cut: a batch input, or a constant
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_handle, touching_nodes
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

Array = np.ndarray[Any, Any]
MOST_BYTES = 1 << 16
"""A constant that takes the place of a value is no larger than this."""


@dataclass(frozen=True)
class Known:
    """What is known of the values of a graph.

    Attributes:
        values: of one step, by tensor.
        batch_axes: the dimension that counts examples, by tensor; of other values there is none.
    """

    values: Mapping[str, Array]
    batch_axes: Mapping[str, int]


def without(item: TrainingGraph, dropped: Collection[str], known: Known) -> TrainingGraph | None:
    """Return a flat item without some nodes and what only they need; None where a value is not known.

    Args:
        item: flat; it is not changed.
        dropped: names of nodes.
        known: what takes the places of their values.
    """
    graph, inputs = item.graph.clone(), dict(item.inputs)
    for name in dropped:
        node = graph.nodes[name]
        for value in node.read_outputs:
            readers = [use for use in value.uses if use.node.name not in dropped]
            source = _source(graph, value, known, inputs) if readers else value
            if source is None:
                return None
            for use in readers:
                use.node.set_input(use.index, source)
        for user in node.control_users:
            user.remove_control(node)
    outputs = {name: one for name, one in item.outputs.items() if one.tensor.partition(":")[0] not in dropped}
    smaller = pruned(replace(item, source=graph, inputs=inputs, outputs=outputs))
    keep_order(item.graph, graph)
    return smaller


def keep_order(before: Graph, after: Graph) -> None:
    """Order accesses to a variable as they were: a read that races with an update would differ by itself.

    Args:
        before: a graph.
        after: what is left of it; it is edited.
    """
    frames = frames_of(topological_order(before))
    accesses = [node for node in touching_nodes(before) if node.name in after.nodes and node not in frames]
    for late in accesses:
        was, now = ancestors([late]), ancestors([after.nodes[late.name]])
        handles = {handle_node(value) for value in late.inputs if is_handle(value)}
        for early in accesses:
            if early is late or early not in was or after.nodes[early.name] in now:
                continue
            if not handles.isdisjoint(handle_node(value) for value in early.inputs if is_handle(value)):
                after.nodes[late.name].add_control(after.nodes[early.name])


def _source(graph: Graph, value: Value, known: Known, inputs: dict[str, TensorInfo]) -> Value | None:
    """Add what stands for a value: a batch input where it counts examples, else a constant."""
    tensor = f"{value.node.name}:{value.index}"
    array = known.values.get(tensor)
    if array is None or array.nbytes > MOST_BYTES or array.dtype == object:
        return None
    name, axis = f"cut/{value.node.name}/{value.index}", known.batch_axes.get(tensor)
    if axis is None:
        return Builder(graph, name).op("Const", value=_stated_once(array), dtype=value.dtype)
    shape = tuple(None if at == axis else size for at, size in enumerate(array.shape))
    node = Builder(graph, name).node("Placeholder", dtype=value.dtype, shape=shape)
    inputs[node.name] = TensorInfo(node.name, f"{node.name}:0", dtypes.dtype_name(value.dtype), shape, axis)
    return node.output()


def pruned(item: TrainingGraph) -> TrainingGraph:
    """Return a flat item without the inputs and variables that no step needs; its graph is edited."""
    graph = item.graph
    ends = [*item.targets, *(one.tensor.partition(":")[0] for one in item.outputs.values())]
    step = {node.name for node in ancestors(graph.nodes[name] for name in ends)}
    variables = {name: one for name, one in item.variables.items() if one.handle in step}
    if item.init_op is not None:
        for name, one in item.variables.items():
            if name not in variables and one.initializer in graph.nodes:
                graph.node(item.init_op).remove_control(graph.node(one.initializer))
    inputs = {name: one for name, one in item.inputs.items() if one.tensor.partition(":")[0] in step}
    roots = [graph.node(name) for name in (*ends, *([item.init_op] if item.init_op else ()))]
    eliminate_dead_code(graph, roots)
    return replace(item, source=graph, inputs=inputs, variables=variables, keep=(), stated_placements=None)


def plain(item: TrainingGraph) -> TrainingGraph:
    """Return a flat item without colocations and without what only hands on an order.

    Args:
        item: flat; it is not changed.
    """
    graph = item.graph.clone()
    ends = {*item.targets, item.init_op}
    for node in list(graph):
        node.drop_attr("_class")  # may name a node that a cut takes away
        if node.op == "NoOp" and node.name not in ends:
            for user in node.control_users:
                user.remove_control(node)
                for control in node.controls:
                    user.add_control(control)
            graph.erase(node)
    return pruned(replace(item, source=graph))


def with_constant_starts(item: TrainingGraph, starts: Mapping[str, Array]) -> TrainingGraph:
    """Return a flat item whose variables begin as constants.

    Args:
        item: flat.
        starts: the value of each variable before the first step.
    """
    graph, variables = item.graph.clone(), {}
    assigns = []
    for name, one in item.variables.items():
        handle = graph.node(one.handle).output()
        array = starts[name]
        build = Builder(graph, f"{one.handle}/start")
        start = build.op("Const", value=_stated_once(array), dtype=dtypes.NUMBERS[one.dtype])
        assigns.append(build.node("AssignVariableOp", handle, start, what="assign"))
        variables[name] = replace(one, initializer=assigns[-1].name)
    init = Builder(graph, "start").node("NoOp", controls=assigns)
    return pruned(replace(item, source=graph, variables=variables, init_op=init.name))


def _stated_once(array: Array) -> Array:
    """Return an array as one element for all where all are the same, bit by bit, so that it can be read and pasted."""
    splat = np.broadcast_to(array.ravel()[:1].reshape(()), array.shape) if array.size else array
    return splat if splat.tobytes() == array.tobytes() else array


def removable(item: TrainingGraph) -> Sequence[str]:
    """Return the nodes of a step that something smaller may take the place of, producers first."""
    ends = [*item.targets, *(one.tensor.partition(":")[0] for one in item.outputs.values())]
    step = ancestors(item.graph.nodes[name] for name in ends)
    nodes = (node for node in topological_order(item.graph) if node in step and node.op != "NoOp")
    return [node.name for node in nodes if not has(node.op, "constants")]
