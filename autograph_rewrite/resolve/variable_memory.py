"""How many bytes of variables each device holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autograph_rewrite.ir.graph import Graph, Span
from autograph_rewrite.training_graph import Variable


def held_bytes(graph: Graph, variables: Mapping[str, Variable], devices: Sequence[str]) -> dict[str, int]:
    """Return the bytes of variables by device, all copies and shards counted; unknown dimensions count as 1.

    Args:
        graph: the folded graph, placed.
        variables: those that the graph has.
        devices: one per replica.
    """
    found = dict.fromkeys(devices, 0)
    for variable in variables.values():
        node = graph.nodes.get(variable.handle)
        if node is None:
            continue
        for device in devices if node.span is not Span.ONCE else (node.device,):
            found[device] = found.get(device, 0) + variable.nbytes
    return found
