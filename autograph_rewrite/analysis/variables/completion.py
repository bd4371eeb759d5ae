"""Where an access to a variable is complete: itself, or, in a loop or a branch, the first nodes behind that.

    Enter ─► Merge ─► Switch ─► body: read(w) ─► ...        read(w) is complete at each Exit that follows from it
                        └─► Exit ─► ...

What is behind one of those nodes only may run while the loop still reads: its counter can be iterations ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import dependencies, marks_before


def completions(
    order: Sequence[Node], unconditional: Collection[Node], accesses: Iterable[Node]
) -> dict[Node, list[Node]]:
    """Return the nodes that run in any case and that together say that an access has happened, if it does at all.

    Args:
        order: the nodes, producers first.
        accesses: what reads or writes variables.
    """
    found = {node: [node] if node in unconditional else [] for node in accesses}
    marks = {node: 1 << i for i, node in enumerate(node for node, ends in found.items() if not ends)}
    if not marks:
        return found
    before = marks_before(order, marks)
    for node in order:
        if node not in unconditional:
            continue
        mask = 0
        for producer in dependencies(node):
            if producer not in unconditional:
                mask |= before[producer] | marks.get(producer, 0)
        if mask:
            for access, mark in marks.items():
                if mask & mark:
                    found[access].append(node)
    return found
