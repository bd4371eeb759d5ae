"""Logical devices: which of a replica's devices each node runs on, while devices have no names yet.

    model: [2, 3]      coordinates (0, 0) (0, 1) (0, 2) (1, 0) (1, 1) (1, 2)
                       number         0      1      2      3      4      5

While tensors are cut, each axis of the mesh says its own coordinate; what no axis says is where the node's operands
are. A node that a later pass makes runs where what it reads was made: a gradient's exchange beside the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import MODEL, Place


def axis_of(axis: int) -> str:
    """Return how the mesh calls an axis of the logical devices while tensors are cut."""
    return f"{MODEL}_{axis}"


def put(node: Node, axis: int, place: int, *, keep: bool = False) -> None:
    """Put a node somewhere on an axis of the mesh.

    Args:
        node: of the folded graph.
        axis: of the model axes.
        place: its coordinate there.
        keep: leave a node that is somewhere on it already where it is.
    """
    if not (keep and axis_of(axis) in node.place):
        node.put(axis_of(axis), place)


def assign(node: Node, device: int, axes: Sequence[int]) -> None:
    """Put a node on a logical device.

    Args:
        node: of the folded graph.
        device: its number.
        axes: sizes of the mesh.
    """
    for axis in reversed(range(len(axes))):
        device, place = divmod(device, axes[axis])
        put(node, axis, place)


def settle(order: Sequence[Node], axis: int) -> None:
    """Put what is nowhere on an axis to its first devices, and on those before it where its operands or readers are.

    Args:
        order: all nodes, producers first.
        axis: the last one that was cut.
    """
    for before in map(axis_of, range(axis)):
        for node in order:
            if before not in node.place:
                made = [value.node.at(before) for value in node.inputs if before in value.node.place]
                if made:
                    node.put(before, max(made))
        for node in reversed(order):
            if before not in node.place:
                readers = [user for value in node.read_outputs for user, _ in value.uses]
                node.put(before, min((user.at(before) for user in readers if before in user.place), default=0))
    for node in order:
        put(node, axis, 0, keep=True)


def number_devices(nodes: Iterable[Node], axes: Sequence[int]) -> None:
    """Say the number of each node's logical device instead of its coordinates.

    Args:
        nodes: all of the graph, settled on every axis.
        axes: sizes of the mesh.
    """
    for node in nodes:
        number = 0
        for axis, size in enumerate(axes):
            number = number * size + node.at(axis_of(axis))
        node.set_place(_numbered(number))


@cache
def _numbered(device: int) -> Place:
    return MappingProxyType({MODEL: device})


def logical_devices(order: Iterable[Node]) -> Mapping[Node, int]:
    """Return the logical device of each node.

    Args:
        order: all nodes, producers first.
    """
    found: dict[Node, int] = {}
    for node in order:
        made = (found[value.node] for value in node.inputs if value.node in found)
        found[node] = node.at(MODEL) if MODEL in node.place else max(made, default=0)
    return found
