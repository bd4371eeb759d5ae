"""Results of the micro-batch loop: what readers outside of it read instead of the values of all micro-batches.

    before   AddN(all(%dw))           ConcatV2(all(%y), 0)          Identity(first(%lr))
    after    the sum that the loop    its list, joined behind it    its value of the first micro-batch
             has carried

What waited for nodes of the loop waits until they have run for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import is_there
from autograph_rewrite.ir.graph import Graph, Node, Select, Span, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL


class Made(Protocol):
    """What loops have made of the values of their iterations."""

    def finished(self, node: Node) -> Node:
        """Return what to wait for until a node of a loop has run as often as it does."""

    def total(self, value: Value) -> Value:
        """Return the sum of a value over all iterations."""

    def first(self, value: Value) -> Value:
        """Return a value as it is of the first micro-batch."""

    def stacked(self, value: Value) -> Value:
        """Return the values of all iterations along a new first dimension."""

    def joined(self, value: Value) -> Value:
        """Return the values of all iterations, joined along their first dimension."""


def read_behind(
    graph: Graph, made: Made, node: Node, inside: Container[Node], unconditional: Container[Node], replicas: int
) -> None:
    """Let a node outside of loops read what they have made of a value.

    Args:
        graph: the folded graph.
        made: by the loops.
        node: runs once, or once on each replica.
        inside: the nodes in loops.
        unconditional: the nodes that run in any case, not only in some branch.
        replicas: how many loops of each kind there are side by side.

    Raises:
        PassError: it reads all micro-batches in a way that a loop cannot prepare, or what may not be there in each.
    """
    needed = [(value.node, is_there(value, unconditional)) for value in node.inputs]
    for producer, is_certain in [*needed, *((control, control in unconditional) for control in node.controls)]:
        if producer in inside and not is_certain:
            raise PassError(f"'{node.name}' needs '{producer.name}', which may not be there", node=node, hint=UNROLL)
    for control in [control for control in node.controls if control in inside]:
        node.remove_control(control)
        node.add_control(made.finished(control))
    if not any(value.node in inside for value in node.inputs):
        return
    if Select.ALL not in node.selects.values():
        for index, value in enumerate(node.inputs):
            if value.node in inside:
                node.set_input(index, made.first(value), Select.FIRST if node.span is Span.ONCE else None)
        return
    joined, join = _joined(made, node)
    inputs, attrs = [joined], {"N": replicas}
    if node.span is Span.REPLICA:
        new = graph.add("Identity", inputs, name=f"{node.name}/looped", span=Span.EACH, origin=node)
    elif replicas == 1:
        new = graph.add("Identity", inputs, name=f"{node.name}/looped", selects={0: Select.FIRST}, origin=node)
    else:
        if join == "ConcatV2":
            zero = {"value": np.int32(0), "dtype": dtypes.INT32}
            inputs.append(graph.add("Const", name=f"{node.name}/axis", attrs=zero).output())
        new = graph.add(join, inputs, name=f"{node.name}/looped", attrs=attrs, selects={0: Select.ALL}, origin=node)
    for control in node.controls:
        new.add_control(control)
    graph.replace(node, new)


def _joined(made: Made, node: Node) -> tuple[Value, str]:
    """Return what one replica's loop has made of the value that a node joins, and the op that joins the replicas."""
    value = node.inputs[0]
    if node.op == "AddN":
        return made.total(value), "AddN"
    if node.op == "Pack" and not node.attr("axis", 0):
        return made.stacked(value), "ConcatV2"
    if node.op == "ConcatV2":
        axis = _axis(node)
        if axis:
            raise PassError(f"'{value.name}' is joined along dimension {axis}", node=node, hint=UNROLL)
        return made.joined(value), "ConcatV2"
    raise PassError(f"{node.op} '{node.name}' reads all micro-batches", node=node, hint=UNROLL)


def _axis(node: Node) -> int:
    axis: Any = node.inputs[1].node.attr("value") if node.inputs[1].node.op == "Const" else 1
    return int(axis)
