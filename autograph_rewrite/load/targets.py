"""Find the train op and the init op of a graph that does not name them."""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.opdefs import find_op
from autograph_rewrite.ir.walk import ancestors, descendants
from autograph_rewrite.load.collected import Collected
from autograph_rewrite.load.inputs import source_values
from autograph_rewrite.load.variables import ASSIGNS, HANDLES, REF_VARIABLES

_GROUPS = frozenset(("NoOp", "Identity"))


def infer_train_ops(graph: Graph, collected: Collected) -> tuple[str, ...]:
    """Return the registered train ops; else the sinks that update a variable from an input; else nothing.

    Where a registered op is one of a group (with moving averages, say), the group is what the user runs.
    """
    registered = [_outermost_group(graph.node(name)).name for name in collected.train_ops if name in graph]
    if registered:
        return tuple(dict.fromkeys(registered))
    fed = descendants(value.node for value in source_values(graph))
    restored = descendants(node for node in graph if node.op == "RestoreV2")
    trained = descendants(node for node in graph if node in fed and node not in restored and _updates(node))
    return tuple(node.name for node in graph if node in trained and _is_sink(node))


def _outermost_group(node: Node) -> Node:
    users = node.control_users
    while len(users) == 1 and users[0].op == "NoOp":
        node, users = users[0], users[0].control_users
    return node


def _is_sink(node: Node) -> bool:
    return not node.control_users and not any(value.uses for value in node.read_outputs)


def _updates(node: Node) -> bool:
    """Whether a node writes a variable."""
    if node.op in HANDLES or node.op in ("ReadVariableOp", "VarIsInitializedOp", "IsVariableInitialized"):
        return False
    op = find_op(node.op)
    if op is None or not op.is_stateful:
        # Legacy updates (Assign, ApplyAdam...) are not registered as stateful: they take a reference.
        takes_reference = op is not None and bool(op.inputs) and op.inputs[0].is_ref
        return takes_reference and _first_source(node) in REF_VARIABLES
    return _first_source(node) in HANDLES and "Gather" not in node.op


def _first_source(node: Node) -> str:
    return node.inputs[0].node.op if node.inputs else ""


def infer_init_op(graph: Graph, targets: Sequence[str]) -> str | None:
    """Return the group that initialises the most variables and reads nothing fed; None when there is none.

    Only ops that collect others by control edges can be one, so the walk stays in them and is short.
    """
    trained = {graph.node(name) for name in targets}
    best: tuple[tuple[int, bool, bool], str] | None = None
    for node in graph:
        if node.op != "NoOp" or node in trained or not node.controls:
            continue
        assigned = _assigned(node)
        rank = (assigned, not node.control_users, node.name == "init")
        if assigned and (best is None or rank > best[0]):
            best = (rank, node.name)
    return best[1] if best is not None else None


def _assigned(group: Node) -> int:
    """Return how many variables a group of assignments initialises; 0 when it does anything else to one."""
    count = 0
    seen = {group}
    stack = [group]
    while stack:
        for node in stack.pop().controls:
            if node in seen:
                continue
            seen.add(node)
            if node.op in _GROUPS:
                stack.append(node)
            elif node.op in ASSIGNS:
                if any(n.op in ("RestoreV2", "Placeholder") for n in ancestors([node.inputs[1].node])):
                    return 0
                count += 1
            elif _updates(node):
                return 0
    return count
