"""Let every read of a variable happen before the step's update, where the graph leaves the order open.

    before   ResourceGather(table)   ResourceScatterAdd(table)     one device happens to read first
    after    ResourceGather(table) ──^──► ResourceScatterAdd(table)

On one device such a race is usually won by the read; spread over replicas it is not (REQUIREMENTS F-27, R-SHARE-4).
A read that follows the update by any path stays behind it, and reads in loops and branches are left alone. Reachability
is propagated as bit masks, one bit per read.
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.frames import unconditional
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.walk import ancestors, dependencies, topological_order
from autograph_rewrite.passes.edges import handle_of, is_update

READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))


def order_reads(graph: Graph, targets: Iterable[Node]) -> int:
    """Add the missing edges; return how many.

    Args:
        graph: the folded graph, complete.
        targets: the nodes that one step runs.
    """
    step = ancestors(targets)
    order = topological_order(graph)
    certain = unconditional(order)
    updates = [node for node in graph if node in step and node in certain and is_update(node)]
    reads = [node for node in graph if node.op in READS and node in certain]
    if not updates or not reads:
        return 0
    marks = {node: 1 << i for i, node in enumerate((*reads, *updates))}
    before = _reach(order, marks)
    by_handle: dict[Node, list[Node]] = {}
    for read in reads:
        by_handle.setdefault(handle_of(read.inputs[0]).node, []).append(read)
    added: list[tuple[Node, Node]] = []
    for update in updates:
        for read in by_handle.get(handle_of(update.inputs[0]).node, ()):
            is_ordered = before[update] & marks[read] or before[read] & marks[update]
            if not is_ordered and _needs_no_more(read, step):
                update.add_control(read)
                added.append((update, read))
    if added and _has_cycle(graph):
        for update, read in added:  # reads of several variables that wait for each other's updates: leave them be
            update.remove_control(read)
        return 0
    return len(added)


def _reach(order: Iterable[Node], marks: dict[Node, int]) -> dict[Node, int]:
    """Return, for each node, the marks of all nodes that run before it."""
    before: dict[Node, int] = {}
    for node in order:
        mask = 0
        for producer in dependencies(node):
            mask |= before[producer] | marks.get(producer, 0)
        before[node] = mask
    return before


def _needs_no_more(read: Node, step: set[Node]) -> bool:
    """Return whether the step runs, or can run, the read without being fed anything else."""
    return read in step or all(node in step for node in ancestors([read]) if node.op.startswith("Placeholder"))


def _has_cycle(graph: Graph) -> bool:
    try:
        topological_order(graph)
    except GraphError:
        return True
    return False
