"""The control-flow context of a node: its loops (Enter) and branches (Switch)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import dependencies
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES, SWITCHES, has

OPENS = ENTERS | SWITCHES
Frame = tuple[str, ...]
"""Names of the nested loops, outermost first; empty outside of all loops."""


class Guard(NamedTuple):
    """A condition: a node behind it runs only where the predicate has this value, in this loop."""

    predicate: Value
    taken: bool
    frame: Frame


Guards = frozenset[Guard]


def frames_of(order: Iterable[Node]) -> dict[Node, Frame]:
    """Return the frame of every node that runs inside a loop.

    Args:
        order: the nodes, producers first.
    """
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
    """Return the frames of nodes in loops that all instances run together, without those that each has for itself.

    Args:
        order: the nodes of a folded graph, producers first.
    """
    frames = frames_of(order)
    together = {frame[0] for node, frame in frames.items() if has(node.op, "loop_test") and node.span != EACH}
    return {node: frame for node, frame in frames.items() if frame[0] in together}


def loops_of(order: Iterable[Node]) -> dict[Node, str]:
    """Return the outermost loop of every node that belongs to one, with those that lead out of it.

    Args:
        order: the nodes, producers first.
    """
    nodes = list(order)
    frames = frames_of(nodes)
    leaving = (node for node in nodes if node.op in EXITS and node.inputs[0].node in frames)
    found = {node: frame[0] for node, frame in frames.items()}
    return found | {node: frames[node.inputs[0].node][0] for node in leaving}


def _name_of(frame: bytes | tuple[bytes, ...]) -> str:
    """Return the name of a loop; of one that each replica has under its own name, the first."""
    return (frame if isinstance(frame, bytes) else frame[0]).decode()


def is_inside(node: Node, frames: Mapping[Node, Frame]) -> bool:
    """Return whether a node is in a loop, and may not wait for anything outside: what enters the loop may."""
    return node in frames and not (node.op in ENTERS and len(frames[node]) == 1)


def before_loops(value: Value) -> Value:
    """Return what a value is that a loop got from outside: where it can be converted once, not in every iteration."""
    while value.node.op in ENTERS:
        value = value.node.inputs[0]
    return value


def by_loops(order: Iterable[Node]) -> list[list[Node]]:
    """Return the nodes, producers first, in runs: those of one outermost loop together, and what lies between loops.

    Args:
        order: the nodes, producers first. Where a loop needs what another part of it makes outside, all are one run.
    """
    nodes = list(order)
    frames = frames_of(nodes)
    parts: dict[object, list[Node]] = {}
    for node in nodes:
        parts.setdefault(frames[node][0] if node in frames else node, []).append(node)
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
    """Return what each node runs behind; those that no branch or loop decides about are left out.

    Args:
        order: the nodes, producers first.
    """
    nodes = list(order)
    found: dict[Node, Guards] = {}
    if OPENS.isdisjoint([node.op for node in nodes]):
        return found
    none: Guards = frozenset()
    for node in nodes:
        if node.op == "ControlTrigger":  # it runs whichever branch did: TensorFlow counts iterations after it
            continue
        given = [
            opened(value, frames, found.get(value.node, none))
            for value in node._inputs
            if value.node.op not in BACK_EDGES
        ]
        if node.op in MERGES:  # runs when one of its inputs does, whatever it waits for besides
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
    """Return under which guards a value is alive: a Switch forwards to one of its outputs only.

    Args:
        frames: the loops around each node; a node without an entry is in none.
    """
    node = value.node
    if node.op not in SWITCHES or len(node._inputs) < 2:
        return guards
    return guards | {Guard(predicate_of(node), bool(value.index), frames.get(node, ()))}


def predicate_of(switch: Node) -> Value:
    """Return the value that decides which way a Switch goes, not a copy of it."""
    return decider(switch._inputs[1])


def decider(value: Value) -> Value:
    """Return what a predicate is a copy of, outside of the loops that it enters."""
    while (has(value.node.op, "carries") or value.node.op == "LoopCond") and value.node._inputs:
        value = value.node._inputs[0]
    return value


def unconditional_nodes(order: Iterable[Node]) -> set[Node]:
    """Return the nodes that certainly run, and run once: outside of loops and of the branches that a Switch opens.

    Args:
        order: the nodes, producers first.
    """
    nodes = list(order)
    frames = frames_of(nodes)
    guards = guards_of(nodes, frames)
    return {node for node in nodes if node not in frames and node not in guards}


def awaited(value: Value, copied: Callable[[Value], Node]) -> Node:
    """Return a node that runs where a value is there; waiting for a Switch would not tell which way it went."""
    return copied(value) if value.node.op in SWITCHES else value.node


def is_there(value: Value, unconditional: Container[Node]) -> bool:
    """Return whether a value certainly is there: a Switch always runs, but each of its outputs only sometimes is."""
    return value.node in unconditional and value.node.op not in SWITCHES
