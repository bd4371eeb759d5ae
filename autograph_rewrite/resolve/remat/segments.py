"""Find segments: the minimal subgraphs between checkpoints that gradients need, and the gradients they wait for.

numbers    x ─► [ a ─► b ─► c ]₀ ─► [ d ─► e ]₁ ─► loss       gradients read a, b, d
segment 0  a, b again, from x                                 c is read by segment 1: kept
segment 1  d again, from c                                    e is read by no gradient

A copy that waited for nothing would run at once and save nothing. The gradients that a segment waits for are triggers:

    gradients    %dd ─► dc = TanhGrad(c', %dd) ─► ...          reads a copy: its other input is a trigger
                 c2 = Mul(2, c') ─► dc = Mul(c2, %dd)          needs no gradient yet: what it is made into reads one

A trigger depends on the segment's forward values, so that it runs later, and on no reader of the copies, which would be
a cycle. If a segment has no trigger, its gradients are the first ones, and recomputing it would save nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autograph_rewrite.analysis.op_work import cost_of
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import descendants, grouped
from autograph_rewrite.ops.traits import has
from autograph_rewrite.resolve.remat.activations import Activations, Left, Segment, root_of
from autograph_rewrite.resolve.remat.policies import Parts

SAVES_NOTHING = "computing it again would keep as much as it saves"


def segments_of(acts: Activations, parts: Parts, *, only_saving: bool) -> tuple[list[Segment], list[Left]]:
    """Return the segments of a policy, in the order of the forward, and the nodes that it had better keep.

    Args:
        only_saving: leave out the segments that save nothing.
    """
    inside = worth_repeating(acts, parts)
    found = _made(acts, acts.forward, {node: part for node, part in parts.items() if node in inside})
    wasted = [segment for segment in found if only_saving and segment.saved_bytes <= 0]
    return [one for one in found if one not in wasted], [Left(one.nodes[0], SAVES_NOTHING) for one in wasted]


def nested_segments(acts: Activations, segment: Segment, inner: Parts) -> list[Segment]:
    """Return the segments within a segment: all but its last part, which gradients read as soon as it is recomputed.

    Args:
        inner: the numbers of its parts.
    """
    inside = [acts.state.graph.nodes[name] for name in segment.nodes]
    parts = {node: inner[node] for node in inside if node in inner}
    return _made(acts, inside, parts, without=max(parts.values(), default=None))


def _made(acts: Activations, nodes: Iterable[Node], parts: Parts, *, without: int | None = None) -> list[Segment]:
    """Return a segment for each part of some nodes except for `without`; values that another part reads are kept."""
    kept = _kept_between(acts, parts)
    wanted = (node for node in nodes if node in parts and node not in kept and parts[node] != without)
    members = grouped((parts[node], node) for node in wanted)
    return [segment for own in members.values() if (segment := _segment(acts, own)) is not None]


def worth_repeating(acts: Activations, nodes: Collection[Node]) -> frozenset[Node]:
    """Return the nodes except for those made of kept random draws alone: a mask has fewer bytes than its draw."""
    made = {node for node in acts.state.order if "Random" in node.op and node not in nodes}
    for node in acts.state.order if made else ():
        if node not in made and any(value.node in made for value in node.inputs):
            others = [value for value in node.inputs if value.node not in made and not has(value.node.op, "sizes")]
            if not any(acts.state.source(value).placement.differs for value in others):
                made.add(node)
    return frozenset(node for node in nodes if node not in made)


def _kept_between(acts: Activations, parts: Parts) -> set[Node]:
    """Return the nodes that another segment reads; for a view, also its source."""
    kept: set[Node] = set()
    for node in acts.forward:
        if node not in parts:
            continue
        for value in node.inputs:
            if value.node in parts and parts[value.node] != parts[node]:
                kept |= {value.node, root_of(value.node)}
    return kept


def _segment(acts: Activations, nodes: Iterable[Node]) -> Segment | None:
    """Return a segment of the nodes that gradients need; None where they need none of them."""
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
    roots = {root_of(value.node) for value in kept}
    more = {root for root in roots if root.inputs and not acts.is_kept_today(root)}  # inputs are kept in any case
    saved = sum(acts.nbytes(root) for root in own) - sum(acts.nbytes(root) for root in more)
    flops = sum(cost_of(acts.state, node) for node in chosen)
    return Segment(tuple(n.name for n in chosen), tuple(v.name for v in kept), float(saved), flops)


def triggers_of(acts: Activations, nodes: Iterable[Node], readers: Iterable[Node]) -> list[Node]:
    """Return the gradients that a segment waits for.

    Args:
        acts: forward and backward of the graph; later segments may have been rewritten.
        readers: the nodes that read the copies, or will.
    """
    readers = set(readers)
    behind = descendants(readers)
    made = descendants(nodes, controls=False, unless="reads_size")  # of their values, not of their sizes alone
    found: dict[Node, None] = {}
    without: set[Node] = set()  # made of copies, and of no gradient so far
    for node in acts.state.order:  # that of the originals: only copies have been added since
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


def _is_gradient(acts: Activations, node: Node) -> bool:
    """Return whether a copy can wait for a node: a gradient of each block, made unconditionally."""
    if node not in acts.backward or node not in acts.unconditional:
        return False
    return any(acts.state.source(value).placement.differs for value in node.read_outputs)
