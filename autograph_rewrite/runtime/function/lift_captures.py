"""Lift captures: a function's graph made self-contained, with captured variables as its own and constants inlined.

    captured     w = Placeholder(dtype=resource)            the user's tf.Variable is passed in
    stand-alone  w = VarHandleOp(shared_name="captured/w")  a variable of the graph, and the value it starts from

The user's variables are only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.load.signature.captures import Capture, FunctionBinding, SavedBinding, SavedCapture
from autograph_rewrite.training_graph import TrainingGraph


class Unbound(NamedTuple):
    """An item that needs nothing from outside, and the values that its variables start from."""

    item: TrainingGraph
    values: Mapping[str, Any]


def unbind(item: TrainingGraph) -> Unbound:
    """Return the item without captures; an item that has none is returned as it is.

    Raises:
        GraphError: it captures a resource that is no variable (a table, an iterator).
    """
    binding = item.binding
    if not isinstance(binding, (FunctionBinding, SavedBinding)):
        return Unbound(item, {})
    graph = item.graph.clone()
    values: dict[str, Any] = {}
    for capture in binding.captures:
        node = graph.nodes.get(capture.node)
        if capture.name is not None:
            values[capture.name] = _value(capture)
            if node is not None:
                _make_variable(node, item, capture.name, values[capture.name])
        elif node is not None:
            _make_constant(node, capture)
    variables = {
        name: replace(variable, captured=False) if name in values else variable
        for name, variable in item.variables.items()
    }
    return Unbound(replace(item, source=graph, variables=variables, binding=None), values)


def _value(capture: Capture | SavedCapture) -> Any:
    """Return the value that a captured variable has now."""
    if isinstance(capture, SavedCapture):
        return capture.value
    return capture.variable.numpy()


def _make_variable(node: Node, item: TrainingGraph, name: str, value: Any) -> None:
    variable = item.variables[name]
    shape = variable.shape if variable.shape is not None else tuple(value.shape)
    attrs = {
        "dtype": dtypes.NUMBERS[variable.dtype],
        "shape": shape,
        "shared_name": f"captured/{node.name}",
        "container": "",
    }
    become(node, "VarHandleOp", (), attrs)
    node.drop_attr("_user_specified_name")


def _make_constant(node: Node, capture: Capture | SavedCapture) -> None:
    dtype = node.attr("dtype")
    if dtype in (dtypes.RESOURCE, dtypes.VARIANT):
        raise GraphError(
            f"the function captures '{capture.node}', a resource that is no variable, so it cannot be run elsewhere",
            node=node,
            hint="pass it to the function as an argument, or verify the step without it",
        )
    value = capture.value if isinstance(capture, SavedCapture) else capture.value.numpy()
    become(node, "Const", (), {"dtype": dtype, "value": value})
    node.drop_attr("_user_specified_name")
