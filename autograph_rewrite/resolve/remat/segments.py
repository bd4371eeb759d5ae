"""Segments: the minimal subgraphs between checkpoints that gradients need, and the gradients that they wait for.

numbers    x ─► [ a ─► b ─► c ]₀ ─► [ d ─► e ]₁ ─► loss       gradients read a, b, d
segment 0  a, b again, from x                                 c is read by segment 1: kept
segment 1  d again, from c                                    e is read by no gradient

A copy that waited for nothing would run at once and save nothing. The gradients that a segment waits for are triggers:

    gradients    %dd ─► dc = TanhGrad(c', %dd) ─► ...          reads a copy: its other input is a trigger
                 c2 = Mul(2, c') ─► dc = Mul(c2, %dd)          needs no gradient yet: what it is made into reads one

A trigger is made of what the segment made in the forward, so that it comes later, and is no descendant of what reads
the copies: the graph would wait for itself. Where nothing is left to wait for, the gradients of the segment are the
first ones, and computing it again would save nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import descendants, topological_order
from autograph_rewrite.ops.traits import has
from autograph_rewrite.resolve.remat.activations import Activations, Left, Segment, root_of
from autograph_rewrite.resolve.remat.policies import Parts
from autograph_rewrite.resolve.stages.flops import cost_of

SAVES_NOTHING = "computing it again would keep as much as it saves"


def segments_of(acts: Activations, parts: Parts, *, only_saving: bool) -> tuple[list[Segment], list[Left]]:
    """Return the segments of a policy, those of later parts of the forward last, and what it had better keep.

    Args:
        acts: what may be computed again.
        parts: what the policy says.
        only_saving: leave out the segments without which less would be kept.
    """
    inside = worth_repeating(acts, parts)
    parts = {node: part for node, part in parts.items() if node in inside}
    kept = _kept_between(acts, parts)
    members: dict[int, list[Node]] = {}
    for node in acts.forward:
        if node in parts and node not in kept:
            members.setdefault(parts[node], []).append(node)
    found = [segment for nodes in members.values() if (segment := _segment(acts, nodes)) is not None]
    wasted = [segment for segment in found if only_saving and segment.saved_bytes <= 0]
    return [one for one in found if one not in wasted], [Left(one.nodes[0], SAVES_NOTHING) for one in wasted]


def nested_segments(acts: Activations, segment: Segment, inner: Parts) -> list[Segment]:
    """Return the segments within a segment: all but its last part, which gradients read as soon as it is there.

    Args:
        acts: what may be computed again.
        segment: what is, together.
        inner: the numbers of its parts.
    """
    inside = [acts.state.graph.nodes[name] for name in segment.nodes]
    parts = {node: inner[node] for node in inside if node in inner}
    if not parts:
        return []
    last, kept = max(parts.values()), _kept_between(acts, parts)
    members: dict[int, list[Node]] = {}
    for node in inside:
        if node in parts and node not in kept and parts[node] != last:
            members.setdefault(parts[node], []).append(node)
    return [one for nodes in members.values() if (one := _segment(acts, nodes)) is not None]


def worth_repeating(acts: Activations, nodes: Collection[Node]) -> frozenset[Node]:
    """Return the nodes without what is made of kept draws alone: a mask has fewer bytes than what was drawn."""
    made = {node for node in acts.state.order if "Random" in node.op and node not in nodes}
    for node in acts.state.order if made else ():
        if node not in made and any(value.node in made for value in node.inputs):
            others = [value for value in node.inputs if value.node not in made and not has(value.node.op, "sizes")]
            if not any(acts.state.source(value).placement.differs for value in others):
                made.add(node)
    return frozenset(node for node in nodes if node not in made)


def _kept_between(acts: Activations, parts: Parts) -> set[Node]:
    """Return the nodes that another segment reads; of a view, what it is a view of, too."""
    kept: set[Node] = set()
    for node in acts.forward:
        if node not in parts:
            continue
        for value in node.inputs:
            if value.node in parts and parts[value.node] != parts[node]:
                kept |= {value.node, root_of(value.node)}
    return kept


def _segment(acts: Activations, nodes: Iterable[Node]) -> Segment | None:
    """Return the part of some nodes that gradients need; None where they need none of them."""
    inside = dict.fromkeys(nodes)
    needed: set[Node] = set()
    for node in reversed(inside):
        if node in needed or acts.is_kept_today(node):
            needed |= {node, *(value.node for value in node.inputs if value.node in inside)}
    chosen = [node for node in inside if node in needed]
    if not chosen:
        return None
    read = dict.fromkeys(value for node in chosen for value in node.inputs if value.node not in needed)
    kept = [value for value in read if acts.state.source(value).placement.differs]
    own = {root_of(node) for node in chosen if acts.is_kept_today(node)} & needed
    more = {root for value in kept if not _is_held(acts, root := root_of(value.node))}
    saved = sum(acts.nbytes(root) for root in own) - sum(acts.nbytes(root) for root in more)
    flops = sum(cost_of(acts.state, node) for node in chosen)
    return Segment(tuple(n.name for n in chosen), tuple(v.name for v in kept), float(saved), flops)


def _is_held(acts: Activations, root: Node) -> bool:
    """Return whether the memory of a node is kept in any case: a gradient reads it, or it is an input."""
    return acts.is_kept_today(root) or not root.inputs


def triggers_of(acts: Activations, nodes: Iterable[Node], readers: Iterable[Node]) -> list[Node]:
    """Return the gradients that a segment waits for.

    Args:
        acts: forward and backward of the graph; segments behind this one may have been rewritten.
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
