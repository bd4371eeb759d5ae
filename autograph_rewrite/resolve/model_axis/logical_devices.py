"""Logical devices: which of a replica's devices each node runs on, while devices have no names yet.

A node that a later pass makes runs where what it reads was made: a gradient's exchange beside the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.attrs import encode

LOGICAL = "_autograph_logical_device"
"""Attribute of a node: its number among the logical devices of its replica."""


def set_logical_device(node: Node, device: int, *, keep: bool = False) -> None:
    """Put a node on a logical device.

    Args:
        node: of the folded graph.
        device: its number.
        keep: leave a node that is somewhere already where it is.
    """
    if not (keep and LOGICAL in node.attrs):
        node.set_raw_attr(LOGICAL, _encoded(device))


@cache
def _encoded(device: int) -> bytes:
    return encode("int", device)


def logical_devices(order: Iterable[Node]) -> Mapping[Node, int]:
    """Return the logical device of each node.

    Args:
        order: all nodes, producers first.
    """
    found: dict[Node, int] = {}
    for node in order:
        stated = node.attr(LOGICAL, -1)
        if stated >= 0:
            found[node] = stated
            continue
        made = [found[value.node] for value in node.inputs if value.node in found]
        found[node] = max(made, default=0)
    return found
