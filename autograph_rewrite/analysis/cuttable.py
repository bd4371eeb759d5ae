"""What stands against cutting a variable into shards: its uses that no shard of it could serve.

ReadVariableOp, ResourceGather, ResourceApplyAdam, AssignVariableOp      each shard has its own
Enter                                                                    a loop captures the handle
ResourceStridedSliceAssign, ResourceCountUpTo                            they work on whole variables only
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.resources import is_handle, source, writes

CARRIERS = frozenset(("Identity", "Switch"))
_UPDATES = re.compile(
    r"Assign(Add|Sub|)VariableOp|Resource(Sparse)?Apply\w+|ResourceScatter(Add|Sub|Mul|Div|Min|Max|Update)"
)
_OTHERS = frozenset(
    ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp", "DestroyResourceOp")
)
_LOOPS = frozenset(("Enter", "Exit", "NextIteration", "Merge"))


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
    pending = [handle]
    while pending:
        for value in pending.pop().read_outputs:
            for node, index in value.uses:
                if node.op in CARRIERS:
                    pending.append(node)
                elif node.op in _LOOPS:
                    return Obstacle("a loop captures it", node)
                elif not _is_known(node, index, cut):
                    return Obstacle(f"{node.op} needs the whole variable", node)
    return None


def _is_known(node: Node, index: int, cut: Collection[Node] | None) -> bool:
    if not writes(node.op):
        return node.op in _OTHERS and index == 0
    handles = [source(value) for value in node.inputs if is_handle(value)]
    return _UPDATES.fullmatch(node.op) is not None and (cut is None or all(handle in cut for handle in handles))
