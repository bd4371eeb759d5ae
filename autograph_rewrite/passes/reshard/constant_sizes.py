"""Replace a size that propagation has found to be a plain number by a constant.

ShapeN(whole, block) ──► ConcatOffset ──► Slice         Const ──► Slice
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autograph_rewrite.ir.control_flow import awaited
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.context import Context, Site


def constant_size(context: Context, node: Node, read: Callable[[Node, int, Value], None]) -> None:
    """Let constants take the place of what a node computes.

    Args:
        context: of the pass.
        node: its outputs are numbers.
        read: lets an input of a node read another value.
    """
    for index, fact in enumerate(context.state.transfers[node].outputs):
        value = node.output(index)
        if not value.uses:
            continue
        dtype = dtypes.numpy_dtype(fact.dtype)
        shape = [dim for dim in fact.shape or () if isinstance(dim, int)]
        content = np.array(fact.value, dtype=dtype).reshape(shape)
        new = context.const(content, dtype, name=f"{node.name}/folded", near=value)
        new.node.set_span(context.common_span)
        _wait_for_operands(context, new.node, node)
        for user, position in value.uses:
            read(user, position, new)
        context.graph.move_anchors(value, new)


def _wait_for_operands(context: Context, constant: Node, folded: Node) -> None:
    """Let a constant in a loop wait for what the node that it stands for has read, not for the node: it must not run.

    Its kernel may compare sizes of blocks with sizes of the whole batch, as that of ConcatOffset does.
    """
    if folded not in constant.controls:
        return

    def taken(value: Value) -> Node:
        return context.add("Identity", [value], Site(f"{folded.name}/taken", value.node.span, folded))

    inside = [value for value in folded.inputs if context.frames.get(value.node) == context.frames.get(folded)]
    operands = [awaited(value, taken) for value in inside]
    if not operands:
        return
    constant.remove_control(folded)
    for node in (*operands, *folded.controls):
        constant.add_control(node)
