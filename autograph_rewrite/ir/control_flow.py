"""Finds the control-flow context of nodes: their loops (Enter) and branches (Switch)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import dependencies, grouped, topological_order, traced_back
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES, SWITCHES, has, ops_with

OPENS = ENTERS | SWITCHES
_COPIES = ops_with("carries") | ops_with("loop_test")
Frame = tuple[str, ...]
"""Names of the nested loops, outermost first; empty outside of all loops."""


class Guard(NamedTuple):
    """A condition: a guarded node runs only where the predicate has this value, in this loop."""

    predicate: Value
    taken: bool
    frame: Frame


Guards = frozenset[Guard]


def frames_of(order: Iterable[Node]) -> dict[Node, Frame]:
    """Return the frame of every node that runs inside a loop; `order` has producers first."""
    frames: dict[Node, Frame] = {}
    nodes = list(order)
    if ENTERS.isdisjoint([node.op for node in nodes]):
        return frames
    for node in nodes:
        frame: Frame = ()
        for producer in (*(value.node for value in node.inputs), *node.controls):
            inner = frames.get(producer, ())
            if len(inner) > len(frame):
                frame = inner
        if node.op in ENTERS:
            source = frames.get(node.inputs[0].node, ())
            frame = (*source, _name_of(node.attr("frame_name")))
        elif node.op in EXITS:
            frame = frame[:-1]
        if frame:
            frames[node] = frame
    return frames


def shared_frames_of(order: Iterable[Node]) -> dict[Node, Frame]:
    """Return the frames of nodes of a folded graph in loops that all instances share; `order` has producers first."""
    frames = frames_of(order)
    together = {frame[0] for node, frame in frames.items() if has(node.op, "loop_test") and node.span != EACH}
    return {node: frame for node, frame in frames.items() if frame[0] in together}


def loops_of(order: Iterable[Node]) -> dict[Node, str]:
    """Return the outermost loop of every node in a loop, and of its Exits; `order` has producers first."""
    nodes = list(order)
    frames = frames_of(nodes)
    leaving = (node for node in nodes if node.op in EXITS and node.inputs[0].node in frames)
    found = {node: frame[0] for node, frame in frames.items()}
    return found | {node: frames[node.inputs[0].node][0] for node in leaving}


def _name_of(frame: bytes | tuple[bytes, ...]) -> str:
    """Return the name of a loop; where each replica has a separate name, the first."""
    return (frame if isinstance(frame, bytes) else frame[0]).decode()


def is_inside(node: Node, frames: Mapping[Node, Frame]) -> bool:
    """Return whether a node is in a loop and must not wait for a node outside; an Enter of an outermost loop may."""
    return node in frames and not (node.op in ENTERS and len(frames[node]) == 1)


def before_loops(value: Value) -> Value:
    """Return the value outside of all loops that an Enter forwards: a conversion there runs once, not per iteration."""
    return traced_back(value, ENTERS)


def by_loops(order: Iterable[Node]) -> list[list[Node]]:
    """Return the nodes, producers first, in runs: one for each outermost loop, and one for the nodes between two loops.

    All nodes are one run if a loop depends, through nodes outside, on its results; `order` has producers first.
    """
    nodes = list(order)
    frames = frames_of(nodes)
    parts: dict[str | Node, list[Node]] = grouped((frames[node][0] if node in frames else node, node) for node in nodes)
    part_of = {node: key for key, members in parts.items() for node in members}
    waits = {
        key: list(dict.fromkeys(part_of[p] for node in members for p in dependencies(node) if part_of[p] != key))
        for key, members in parts.items()
    }
    try:
        keys = list(TopologicalSorter(waits).static_order())
    except CycleError:
        return [nodes]
    runs: list[list[Node]] = []
    for key in keys:
        if isinstance(key, str) or not runs or runs[-1][0] in frames:
            runs.append([])
        runs[-1] += parts[key]
    return runs


def guards_of(order: Iterable[Node], frames: dict[Node, Frame]) -> dict[Node, Guards]:
    """Return the guards of each node that has any; `order` has producers first."""
    nodes = list(order)
    found: dict[Node, Guards] = {}
    if OPENS.isdisjoint([node.op for node in nodes]):
        return found
    none: Guards = frozenset()
    for node in nodes:
        if node.op == "ControlTrigger":  # it runs whichever branch is taken: it ignores dead control inputs
            continue
        given = [
            opened(value, frames, found.get(value.node, none))
            for value in node._inputs
            if value.node.op not in BACK_EDGES
        ]
        if node.op in MERGES:  # runs when one of its inputs does, whatever its control edges say
            guards = given[0].intersection(*given[1:]) if given else none
        else:
            guards = none.union(*given, *(found.get(control, none) for control in node._controls))
        if node.op in EXITS:
            depth = len(frames.get(node, ()))
            guards = frozenset(guard for guard in guards if len(guard.frame) <= depth)
        if guards:
            found[node] = guards
    return found


def opened(value: Value, frames: dict[Node, Frame], guards: Guards) -> Guards:
    """Return the guards under which a value is alive: a Switch forwards to one of its outputs only.

    Args:
        frames: the loops around each node; a node without an entry is in none.
    """
    node = value.node
    if node.op not in SWITCHES or len(node._inputs) < 2:
        return guards
    return guards | {Guard(predicate_of(node), bool(value.index), frames.get(node, ()))}


def predicate_of(switch: Node) -> Value:
    """Return the original predicate of a Switch, not a copy of it."""
    return decider(switch._inputs[1])


def decider(value: Value) -> Value:
    """Return the value that a predicate is a copy of, followed back through Identity, Enter, Switch and LoopCond."""
    return traced_back(value, _COPIES)


def unconditional_nodes(order: Iterable[Node]) -> set[Node]:
    """Return the nodes that run, and run once: those outside of loops and branches; `order` has producers first."""
    nodes = list(order)
    frames = frames_of(nodes)
    guards = guards_of(nodes, frames)
    return {node for node in nodes if node not in frames and node not in guards}


def tie_constants(graph: Graph) -> None:
    """Let constants that a node of a loop reads run in that loop, after another operand of their reader.

    A constant has no inputs, so without a control edge it is in no loop, and its reader would never get it.
    """
    if not any(node.op in ENTERS for node in graph):
        return  # no order to find
    frames = frames_of(topological_order(graph))
    for node in frames:
        inside = [value.node for value in node.inputs if value.node in frames]
        if inside and node.op not in ENTERS and len(inside) < len(node.inputs):
            for value in node.inputs:
                if value.node not in frames and not value.node.inputs:
                    value.node.add_control(inside[0])


def awaited(value: Value, copied: Callable[[Value], Node]) -> Node:
    """Return a node that runs only where a value is alive; a Switch itself runs whichever branch it takes."""
    return copied(value) if value.node.op in SWITCHES else value.node


def is_there(value: Value, unconditional: Container[Node]) -> bool:
    """Return whether a value is always alive; an output of a Switch is not, although the Switch always runs."""
    return value.node in unconditional and value.node.op not in SWITCHES
