"""Stages of what runs once: a variable, its slots and its update are where it is first read.

from the summed gradient to the update: the stage of the gradient, or that of the update if it has a part in what they
read; what touches a variable: beside it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update


def stages_of_once(
    order: Sequence[Node], given: Mapping[Node, int], owners: Mapping[Node, Node], *, captured: bool = False
) -> dict[Node, int]:
    """Return the stages of the nodes that do not run for each block.

    Args:
        order: the nodes of a folded graph, producers first.
        given: the stages of those that run for each block.
        owners: for which variable another is kept, as the nodes that give their handles.
        captured: variables live outside of the graph, on the first device.
    """
    handles = _of_handles(order, given, owners)
    found: dict[Node, int] = {}
    choices: dict[Node, list[int]] = {}
    for node in order:
        if node.span == EACH:
            found[node] = given.get(node, 0)
            continue
        touched = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
        producers = [found[value.node] for value in node.inputs if value.node.span == EACH or value.node in found]
        if touched or node in handles:
            found[node] = handles.get(touched[0] if touched else node, 0)
        elif producers:
            found[node], choices[node] = max(producers), producers
        if captured and (touched or _gives_handle(node)):
            found[node] = 0
    for node in reversed(order):
        if node.span == EACH:
            continue
        readers = [found[use.node] for value in node.read_outputs for use in value.uses if use.node in found]
        if node not in found:
            found[node] = min(readers, default=0)
        elif len(set(readers)) == 1 and readers[0] in choices.get(node, ()):
            found[node] = readers[0]  # a gradient that is scaled by the norm of all stays where it is
    return {node: stage for node, stage in found.items() if node.span != EACH}


def _gives_handle(node: Node) -> bool:
    return any(value.dtype == dtypes.RESOURCE for value in node.read_outputs) and not node.inputs


def _of_handles(order: Sequence[Node], given: Mapping[Node, int], owners: Mapping[Node, Node]) -> dict[Node, int]:
    """Return the stage of each variable: the first that reads it; of slots, that of what they are kept for.

    Where that is not known, it is the stage of the gradient that updates them.
    """
    handles: dict[Node, int] = {}
    for node in order:
        if not any(value.dtype == dtypes.RESOURCE for value in node.inputs) or is_update(node):
            continue
        readers = {use.node for value in node.read_outputs for use in value.uses}
        own = {node} if node.span == EACH else set()
        read_in = [given[reader] for reader in readers | own if reader in given]
        for value in node.inputs:
            if value.dtype == dtypes.RESOURCE and read_in:
                handle = handle_node(value)
                handles[handle] = min(handles.get(handle, read_in[0]), *read_in)
    kept = {slot: handles[owner] for slot, owner in owners.items() if owner in handles}
    handles = {**kept, **handles}
    reached: dict[Node, int] = {}
    for node in order:
        if node.span == EACH:
            continue
        predecessors = [given[v.node] for v in node.inputs if v.node in given]
        predecessors += [reached[v.node] for v in node.inputs if v.node in reached]
        if predecessors:
            reached[node] = max(predecessors)
        if not is_update(node):
            continue
        touched = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
        known = [handles[handle] for handle in touched if handle in handles]
        stage = known[0] if known else reached.get(node)
        if stage is not None:
            handles |= {handle: stage for handle in touched if handle not in handles}
    return handles
