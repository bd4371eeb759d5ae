"""What a comparison with one device says nothing about: whatever depends on a replica's number or own component.

id ──► noise ──► loss ──► gradient ──► w        loss and w are not those of one device, and need not be
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types.replica_marks import COUNT, ID, replica_mark
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ops.traits import READS
from autograph_rewrite.training_graph import TrainingGraph

Found = TypeVar("Found")
SHOWN = 5


def incomparable(item: TrainingGraph, rewritten: TrainingGraph) -> frozenset[str]:
    """Return the keys ("variable NAME", "output NAME") of what differs from one device by design.

    Args:
        item: normalised.
        rewritten: what was made of it; its report names the variables whose updates are merged from replicas' own.
    """
    graph = item.graph
    handles = {graph.nodes[v.handle]: name for name, v in item.variables.items() if v.handle in graph.nodes}
    reached: set[Node] = set()
    pending = [node for node in graph if replica_mark(node.name) in (ID, COUNT)]
    variables = {note.node for note in rewritten.report.inexact if note.node in item.variables}
    pending += [read for handle, name in handles.items() if name in variables for read in _reads(handle)]
    while pending:
        reached |= descendants(pending, controls=False) | set(pending)
        written = {handle_node(value) for node in reached if is_update(node) for value in node.inputs[:1]}
        new = {handles[handle] for handle in written if handle in handles} - variables
        variables |= new
        pending = [read for handle, name in handles.items() if name in new for read in _reads(handle)]
    outputs = {name for name, info in item.outputs.items() if graph.value(info.tensor).node in reached}
    return frozenset({*(f"variable {name}" for name in variables), *(f"output {name}" for name in outputs)})


def _reads(handle: Node) -> list[Node]:
    return [use.node for use in handle_uses(handle) if use.node.op in READS]


def unless(found: Mapping[str, Found], apart: Collection[str]) -> dict[str, Found]:
    """Return what is compared.

    Args:
        found: by "variable NAME" and "output NAME".
    """
    return {key: one for key, one in found.items() if key not in apart}


def said(apart: Collection[str]) -> list[str]:
    """Say what was not compared."""
    if not apart:
        return []
    names = sorted(apart)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    why = "they depend on the number of a replica, or on what replicas have alone (variable_policies)"
    return [f"not compared with one device, from which they differ by design: {', '.join(names[:SHOWN])}{more}; {why}"]
