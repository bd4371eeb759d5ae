"""XLA's OpSharding as it stands in the attributes of graphs, read from its bytes: TensorFlow is not needed for that.

    08 03  1a 02 01 02  22 02 00 01      type OTHER, tile_assignment_dimensions [1, 2], devices [0, 1]

Format: xla_data.proto of XLA (OpSharding); `xla_sharding.split`, `tile`, `partial_tile`, `mesh_split`, `replicate` and
`assign_device` write it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autograph_rewrite.ir.types.wire import LENGTH_DELIMITED, fields, read_varint

REPLICATED, MAXIMAL, TUPLE, OTHER, MANUAL, UNKNOWN = range(6)
_TYPE, _DIMENSIONS, _DEVICES, _PARTS, _REPLICATES_LAST, _LAST_TYPES = 1, 3, 4, 5, 6, 8
_RESHAPED, _TRANSPOSED = 9, 10
_LISTS: Mapping[int, str] = {
    _DIMENSIONS: "tiles",
    _DEVICES: "devices",
    _LAST_TYPES: "last",
    _RESHAPED: "reshaped",
    _TRANSPOSED: "transposed",
}


@dataclass(frozen=True)
class OpSharding:
    """A sharding of the value that an op makes.

    Attributes:
        type: one of those above.
        tiles: into how many tiles each dimension is cut; without the dimensions behind those of the tensor.
        devices: the device of each tile, last dimension fastest.
        copies: on how many devices each tile is.
        parts: of an op with several outputs, the sharding of each (TUPLE).
    """

    type: int = REPLICATED
    tiles: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    copies: int = 1
    parts: tuple[OpSharding, ...] = ()

    @property
    def is_manual(self) -> bool:
        """Whether a program cuts the value itself, with ops that see one shard."""
        return self.type == MANUAL or any(part.is_manual for part in self.parts)

    def of(self, index: int) -> OpSharding:
        """Return the sharding of one output of an op."""
        if self.type != TUPLE:
            return self
        return self.parts[index] if index < len(self.parts) else OpSharding()


def read_op_sharding(data: bytes) -> OpSharding:
    """Return a sharding from its bytes.

    Raises:
        ValueError: they are none.
    """
    numbers: dict[str, list[int]] = {name: [] for name in _LISTS.values()}
    kind, is_partial, parts = REPLICATED, False, []
    try:
        for field, wire, _, start, stop in fields(data):
            if field in _LISTS:
                numbers[_LISTS[field]] += (
                    _packed(data, start, stop) if wire == LENGTH_DELIMITED else [_one(data, start)]
                )
            elif field == _PARTS:
                parts.append(read_op_sharding(data[start:stop]))
            elif field == _TYPE:
                kind = _one(data, start)
            elif field == _REPLICATES_LAST:
                is_partial = bool(_one(data, start))
    except IndexError:
        raise ValueError("a number is cut off") from None
    found = OpSharding(kind, tuple(numbers["tiles"]), tuple(numbers["devices"]), 1, tuple(parts))
    if kind != OTHER:
        return found
    last = numbers["last"] or [REPLICATED] * is_partial
    if not found.devices:
        found = replace(found, devices=_iota(numbers["reshaped"], numbers["transposed"]))
    rank = len(found.tiles) - len(last)
    if MANUAL in last:
        found = replace(found, type=MANUAL)
    return replace(found, tiles=found.tiles[:rank], copies=math.prod(found.tiles[rank:]))


def _one(data: bytes, at: int) -> int:
    return read_varint(data, at)[0]


def _packed(data: bytes, at: int, end: int) -> list[int]:
    found = []
    while at < end:
        number, at = read_varint(data, at)
        found.append(number)
    return found


def _iota(dims: list[int], order: list[int]) -> tuple[int, ...]:
    """Return 0, 1, ... in the order of an array of these dimensions whose dimensions are then transposed."""
    strides = [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]
    found = [0] if dims else []
    for dim in order:
        found = [number + step * strides[dim] for number in found for step in range(dims[dim])]
    return tuple(found)
