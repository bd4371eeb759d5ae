"""Preserve the order of variable accesses while `relax_waits` removes control edges that only keep values together.

before   read(w) ─► %y ─► %dy ─^─► 0.9 ─► w -= 0.9 w      the constant waits for a gradient, which needs the read
after    read(w) ─^─► w -= 0.9 w                          nothing waits for %dy, and the update is behind as before

What a loop or a branch reads has been read when all that leaves it and follows from the read is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autograph_rewrite.analysis.variables.completion import completions
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.traits import READS

Pair = tuple[Node, Node]
"""What an earlier access of a variable is complete with, and a later access; one of the two accesses updates it."""


def accesses_in_order(order: Sequence[Node], unconditional: Collection[Node]) -> list[Pair]:
    """Return the accesses of one variable of which the graph says which comes first.

    Args:
        order: the nodes, producers first.
        unconditional: those that run in any case.
    """
    of: dict[Node, list[Node]] = {}
    for node in order:
        if node.op in READS or is_update(node):
            for handle in dict.fromkeys(handle_node(v) for v in node.inputs if v.dtype == dtypes.RESOURCE):
                of.setdefault(handle, []).append(node)
    groups = [nodes for nodes in of.values() if any(map(is_update, nodes))]
    ends = completions(order, unconditional, dict.fromkeys(node for nodes in groups for node in nodes))
    pairs = [
        (end, later)
        for nodes in groups
        for later in nodes
        for earlier in nodes
        if earlier is not later and later in unconditional and (is_update(earlier) or is_update(later))
        for end in ends[earlier]
    ]
    return _in_order(order, pairs)


def keep_order(graph: Graph, pairs: Iterable[Pair]) -> None:
    """Let the later access wait for the earlier one where it no longer does.

    Args:
        graph: the folded graph.
        pairs: what `accesses_in_order` has found in it.
    """
    known = list(pairs)
    kept = set(_in_order(topological_order(graph), known))
    for pair in known:
        if pair not in kept:
            pair[1].add_control(pair[0])


def _in_order(order: Sequence[Node], pairs: Sequence[Pair]) -> list[Pair]:
    marks = {node: 1 << i for i, node in enumerate(dict.fromkeys(one for one, _ in pairs))}
    before = marks_before(order, marks)
    return [(one, other) for one, other in pairs if before[other] & marks[one]]
