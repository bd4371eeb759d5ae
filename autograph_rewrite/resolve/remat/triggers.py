"""Triggers: the gradients after which a segment is recomputed.

    gradients    %dd ─► dc = TanhGrad(c', %dd) ─► ...          reads a copy: what it reads besides is a trigger
                 c2 = Mul(2, c') ─► dc = Mul(c2, %dd)          needs no gradient yet: what it is made into reads one

A trigger is made of what the segment made in the forward, so that it comes later, and is no descendant of what reads
the copies: the graph would wait for itself. Where nothing is left to wait for, the gradients of the segment are the
first ones, and computing it again would save nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import descendants, topological_order
from autograph_rewrite.ops.traits import has
from autograph_rewrite.resolve.remat.activations import Activations


def triggers_of(acts: Activations, nodes: Iterable[Node], readers: Iterable[Node]) -> list[Node]:
    """Return the gradients that a segment waits for.

    Args:
        acts: forward and backward of the graph; segments behind this one may have been rewritten.
        nodes: of the segment.
        readers: the nodes that read their copies, or will.
    """
    readers = set(readers)
    behind, made = descendants(readers), _made_of(nodes)
    found: dict[Node, None] = {}
    without: set[Node] = set()  # made of copies, and of no gradient so far
    for node in topological_order(acts.state.graph):
        if node not in behind or node not in acts.backward:
            continue
        producers = [value.node for value in node.inputs]
        if node not in readers and without.isdisjoint(producers):
            continue
        upstream = [p for p in producers if p not in behind and p in made and _is_gradient(acts, p)]
        if upstream:
            found |= dict.fromkeys(upstream)
        elif not any(p in behind and p not in without and p in acts.backward for p in producers):
            without.add(node)
    return list(found)


def _made_of(nodes: Iterable[Node]) -> set[Node]:
    """Return what is computed from the values of some nodes, and not from their sizes alone."""
    seen = set(nodes)
    pending = list(seen)
    while pending:
        for value in pending.pop().read_outputs:
            for use in value.uses:
                if use.node not in seen and not has(use.node.op, "reads_size"):
                    seen.add(use.node)
                    pending.append(use.node)
    return seen


def _is_gradient(acts: Activations, node: Node) -> bool:
    """Return whether a node is one that a copy can wait for: a gradient of each block, made in any case."""
    if node not in acts.backward or node not in acts.unconditional:
        return False
    return any(acts.state.source(value).placement.differs for value in node.read_outputs)
