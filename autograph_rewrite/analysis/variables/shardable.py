"""Whether a variable can be sharded: the uses of it that need the full value, as reasons against.

ReadVariableOp, ResourceGather, ResourceApplyAdam, AssignVariableOp      each shard has its own
Enter                                                                    a loop captures the handle
ResourceStridedSliceAssign, ResourceCountUpTo                            they work on whole variables only
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_handle
from autograph_rewrite.ops.traits import SWITCHES, has


class Obstacle(NamedTuple):
    """A use that needs the whole variable, and why."""

    reason: str
    node: Node


def obstacle(handle: Node, cut: Collection[Node] | None = None) -> Obstacle | None:
    """Return a use of a variable that no shard could serve, None where it can be cut.

    Args:
        handle: the node that gives its handle.
        cut: the handles of all variables that are cut the same way; None where that is not known yet.
    """
    for node, index in handle_uses(handle):
        if has(node.op, "routes") and node.op not in SWITCHES:
            return Obstacle("a loop captures it", node)
        if not (has(node.op, "forwards_handle") or _is_known(node, index, cut)):
            return Obstacle(f"{node.op} needs the whole variable", node)
    return None


def _is_known(node: Node, index: int, cut: Collection[Node] | None) -> bool:
    if not has(node.op, "writes"):
        is_known = has(node.op, "reads", "inspects") or node.op == "DestroyResourceOp"
        return is_known and index == 0
    handles = [handle_node(value) for value in node.inputs if is_handle(value)]
    return has(node.op, "writes_blocks") and (cut is None or all(handle in cut for handle in handles))
