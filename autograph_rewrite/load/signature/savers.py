"""Save and restore subgraphs, found by their ops: Savers leave no trace in a graph's collections.

v ──► SaveV2 ──^──► Identity "save/control_dependency"         fetched by Saver.save
RestoreV2 ──► AssignVariableOp ──^──► NoOp "save/restore_all"    run by Saver.restore
"""

from __future__ import annotations

from collections.abc import Collection

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ops.traits import has


def savers(graph: Graph, used: Collection[Node]) -> tuple[str, ...]:
    """Return the names of what nobody but the program itself reads of all that saves and restores.

    Args:
        graph: a training graph.
        used: what the step and the init op run; what they restore belongs to them.
    """
    files = (node for node in graph if has(node.op, "checkpoint_files") and node not in used)
    after = {node for node in descendants(files) if node not in used}
    ends = (node for node in graph if node in after and not _is_read_in(node, after))
    return tuple(node.name for node in ends)


def _is_read_in(node: Node, after: Collection[Node]) -> bool:
    readers = [use.node for value in node.read_outputs for use in value.uses]
    return any(reader in after for reader in (*readers, *node.control_users))
