"""One order for NCCL's collectives: each waits for the one before it, on every device alike.

    all_reduce(dw1)  all_reduce(dw2)   ──►   all_reduce(dw1) ──► all_reduce(dw2)

The folded graph has each collective once and no cycle, so any order of it will do, and all processes find the same one:
by the longest ways to them, so that none that is ready early waits for one that is ready late. Rings of TensorFlow's
own need none: their members find each other by their keys.
"""

from __future__ import annotations

from itertools import pairwise

from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Span
from autograph_rewrite.ir.traversal import descendants, levels, topological_order
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ir.verify.nccl import uses_nccl
from autograph_rewrite.passes.emit.assign_devices import stays_on_host


def order_collectives(graph: Graph) -> None:
    """Chain the collectives that ask for NCCL; those of loops stay as they are.

    One in a branch comes after all that do not depend on it: nothing else may wait for what a branch may not do.

    Args:
        graph: folded.
    """
    order = topological_order(graph)
    level = levels(order)
    asking = [node for node in sorted(order, key=level.__getitem__) if is_collective(node.op) and uses_nccl(node)]
    for node in asking:
        if node.span is Span.ONCE and stays_on_host(node):
            node.set_attr("communication_hint", "auto")
    asking = [node for node in asking if uses_nccl(node)]
    if not asking:
        return
    frames = frames_of(order)
    guards = guards_of(order, frames)
    free = [node for node in asking if node not in frames and not guards.get(node)]
    for before, node in pairwise(free):
        node.add_control(before)
    for guarded in [node for node in asking if node not in frames and guards.get(node)]:
        later = descendants([guarded])
        reached = next((i for i, node in enumerate(free) if node in later), len(free))
        if reached:
            guarded.add_control(free[reached - 1])
        beside = [node for node in asking if guards.get(node) == guards[guarded] and node not in frames]
        for before, node in pairwise(beside):
            node.add_control(before)
