"""Which loop each node runs in: the frames that Enter opens and Exit leaves."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.ir.graph import Node

OPENS = frozenset(("Enter", "RefEnter", "Switch", "RefSwitch"))
Frame = tuple[str, ...]
"""Names of the nested loops, outermost first; empty outside of all loops."""


def frames_of(order: Iterable[Node]) -> dict[Node, Frame]:
    """Return the frame of every node that runs inside a loop.

    Args:
        order: the nodes, producers first.
    """
    frames: dict[Node, Frame] = {}
    nodes = list(order)
    if not any(node.op in ("Enter", "RefEnter") for node in nodes):
        return frames
    for node in nodes:
        frame: Frame = ()
        for producer in (*(value.node for value in node.inputs), *node.controls):
            inner = frames.get(producer, ())
            if len(inner) > len(frame):
                frame = inner
        if node.op in ("Enter", "RefEnter"):
            source = frames.get(node.inputs[0].node, ())
            frame = (*source, node.attr("frame_name").decode())
        elif node.op in ("Exit", "RefExit"):
            frame = frame[:-1]
        if frame:
            frames[node] = frame
    return frames


def unconditional(order: Iterable[Node]) -> set[Node]:
    """Return the nodes that certainly run, and run once: outside of loops and of the branches that a Switch opens.

    Args:
        order: the nodes, producers first.
    """
    nodes = list(order)
    if not any(node.op in OPENS for node in nodes):
        return set(nodes)
    frames = frames_of(nodes)
    level: dict[Node, int] = {}
    for node in nodes:
        producers = [*(value.node for value in node.inputs if value.node in level), *node.controls]
        depth = max((level[p] for p in producers), default=0)
        if node.op in ("Switch", "RefSwitch"):
            depth += 1
        elif node.op in ("Merge", "RefMerge", "Exit", "RefExit"):
            depth = max(min((level[p] for p in producers), default=0) - 1, 0)
        level[node] = depth
    return {node for node in nodes if node not in frames and not level[node]}
