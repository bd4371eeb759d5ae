"""The pieces that stand for a node once it is decomposed: named after it, in its place.

before   Mean ──► readers
after    Mean/sum ─► Mean/mean ──► readers      the last one takes the name
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.types import dtypes


class Pieces:
    """Adds the pieces that stand for one node.

    Args:
        graph: edited in place.
        node: whose place they take.
        in_loop: whether it runs inside a loop, to whose iterations constants are tied.
    """

    def __init__(self, graph: Graph, node: Node, in_loop: bool) -> None:
        self._graph = graph
        self._node = node
        self._in_loop = in_loop

    def __call__(self, op: str, *inputs: Value, name: str = "", **attrs: Any) -> Value:
        """Add a node; return its first output.

        Args:
            op: op type.
            *inputs: its operands.
            name: told after that of the node that it stands for; "": its op.
            **attrs: by name, decoded.
        """
        made = self._graph.add(
            op,
            inputs,
            name=f"{self._node.name}/{name or op}",
            attrs=attrs or None,
            origin=self._node,
        )
        return made.output()

    def const(self, content: Any, dtype: int, name: str) -> Value:
        """Add a constant.

        Args:
            content: a number, nested lists or an array.
            dtype: of its elements.
            name: told after that of the node that it stands for.
        """
        array = np.asarray(content, dtype=dtypes.numpy_dtype(dtype))
        made = self._graph.add(
            "Const", name=f"{self._node.name}/{name}", attrs={"value": array, "dtype": dtype}, origin=self._node
        )
        if self._in_loop:
            made.add_control(self._node.inputs[0].node)  # without an input it would run outside of the loop
        return made.output()

    def cast(self, value: Value, dtype: int, name: str) -> Value:
        """Return a value in an element type.

        Args:
            value: of any type.
            dtype: the type.
            name: of the conversion, if one is needed.
        """
        return value if value.dtype == dtype else self("Cast", value, name=name, DstT=dtype)


def finish(graph: Graph, node: Node, results: Mapping[int, Value]) -> None:
    """Let `results` stand for the outputs of `node`, and drop it; a single result also takes its name.

    Args:
        graph: edited in place.
        node: which is erased.
        results: by the number of the output.
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
