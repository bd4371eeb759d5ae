"""How many bytes of variables each device holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Graph, Span
from autograph_rewrite.item import Variable


def held_bytes(graph: Graph, variables: Mapping[str, Variable], devices: Sequence[str]) -> dict[str, int]:
    """Return the bytes of variables by device, all copies and shards counted; unknown dimensions count as 1.

    Args:
        graph: the folded graph, placed.
        variables: those that the graph has.
        devices: one per replica.
    """
    found = dict.fromkeys(devices, 0)
    for variable in variables.values():
        node, number = graph.nodes.get(variable.handle), dtypes.NUMBERS.get(variable.dtype)
        if node is None or number is None:
            continue
        size = math.prod(dim or 1 for dim in variable.shape or ()) * dtypes.width(number)
        for device in devices if node.span is Span.EACH else (node.device,):
            found[device] = found.get(device, 0) + size
    return found
