"""Logical devices: which of a replica's devices each node runs on, while devices have no names yet.

    model: [2, 3]      coordinates (0, 0) (0, 1) (0, 2) (1, 0) (1, 1) (1, 2)
                       number         0      1      2      3      4      5

While tensors are cut, each axis of the mesh says its own coordinate; what no axis says is where the node's operands
are. A node that a later pass makes runs where what it reads was made: a gradient's exchange beside the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.attrs import encode

LOGICAL = "_autograph_logical_device"
"""Attribute of a node: its number among the logical devices of its replica."""
COORDINATES = "_autograph_model_coordinates"
"""Attribute of a node while tensors are cut: its place on each axis of the mesh, -1 where none is said yet."""


def put(node: Node, axis: int, place: int, *, keep: bool = False) -> None:
    """Put a node somewhere on an axis of the mesh.

    Args:
        node: of the folded graph.
        axis: of the model axes.
        place: its coordinate there.
        keep: leave a node that is somewhere on it already where it is.
    """
    said = _said(node, axis)
    if not (keep and said[axis] >= 0):
        said[axis] = place
        node.set_raw_attr(COORDINATES, _coordinates(tuple(said)))


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
    places = {node: _said(node, axis) for node in order}
    for said in places.values():
        said[axis] = max(said[axis], 0)
    for before in range(axis):
        for node, said in places.items():
            if said[before] < 0:
                said[before] = max((places[value.node][before] for value in node.inputs), default=-1)
        for node in reversed(order):
            if places[node][before] < 0:
                read = [places[user][before] for value in node.read_outputs for user, _ in value.uses]
                places[node][before] = min((place for place in read if place >= 0), default=0)
    for node, said in places.items():
        node.set_raw_attr(COORDINATES, _coordinates(tuple(said)))


def number_devices(nodes: Iterable[Node], axes: Sequence[int]) -> None:
    """Say the number of each node's logical device instead of its coordinates.

    Args:
        nodes: all of the graph, settled on every axis.
        axes: sizes of the mesh.
    """
    for node in nodes:
        number = 0
        for size, place in zip(axes, _said(node, len(axes) - 1), strict=True):
            number = number * size + place
        node.drop_attr(COORDINATES)
        node.set_raw_attr(LOGICAL, _encoded(number))


@cache
def _coordinates(places: tuple[int, ...]) -> bytes:
    return encode("list(int)", places)


@cache
def _encoded(device: int) -> bytes:
    return encode("int", device)


def _said(node: Node, axis: int) -> list[int]:
    found = list(node.attr(COORDINATES, ()))
    return found + [-1] * (axis + 1 - len(found))


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
