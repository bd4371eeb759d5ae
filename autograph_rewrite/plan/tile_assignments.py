"""Which axes of a mesh a tile assignment of XLA stands for.

    mesh [2, 2]    tiles [2, 2], devices 0 1 2 3              axes [0, 1]
                   tiles [2, 2], devices 0 2 1 3              axes [1, 0]
                   tiles [1, 2], devices 0 2 1 3, 2 copies    axes [-1, 1]      each tile on the two devices of axis 0

XLA lists the device of each tile, last dimension fastest; `mesh_split` makes such lists from axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import numpy as np


def axes_of_tiles(tiles: Sequence[int], devices: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axis that cuts each dimension, -1 where none does; None where it is not one axis for each.

    Args:
        tiles: into how many each dimension is cut.
        devices: of each tile in turn; several where each is on several.
        sizes: of the mesh.
    """
    count, cut = math.prod(tiles), [dim for dim, parts in enumerate(tiles) if parts > 1]
    if not count or len(devices) != math.prod(sizes) or sorted(devices) != list(range(len(devices))):
        return None
    wanted = np.sort(np.reshape(devices, (count, -1)))
    mesh = np.arange(len(devices)).reshape(tuple(sizes))
    for chosen in permutations(range(len(sizes)), len(cut)):
        if [sizes[axis] for axis in chosen] != [tiles[dim] for dim in cut]:
            continue
        rest = [axis for axis in range(len(sizes)) if axis not in chosen]
        if np.array_equal(np.sort(mesh.transpose(*chosen, *rest).reshape(count, -1)), wanted):
            by_dim = dict(zip(cut, chosen, strict=True))
            return tuple(by_dim.get(dim, -1) for dim in range(len(tiles)))
    return None
