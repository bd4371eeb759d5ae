"""Define marks for placements on the model axis, as node names that TensorFlow ignores.

    h = ar.split(h, [1, 2])      an identity .../autograph_sharding/split-1x2: the second dimension is split in two
    w = ar.replicate(w)          .../autograph_sharding/replicate: every device of a replica has all of it
    t = ar.assign(t, 1)          .../autograph_sharding/assign-1: logical device 1 computes it

Without a model axis they are plain identities. XLA has the same three as `xla_sharding.split`, `replicate` and
`assign`, with the same checks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autograph_rewrite.config.split_parts import HINT, MODEL, read_parts
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types.wire import LENGTH_DELIMITED, fields, read_varint

SCOPE = "autograph_sharding"
PLACE = "_autograph_place"
"""The attribute of a mark with the line of the program that made it."""
XLA_SHARDING = "_XlaSharding"
"""The attribute that holds XLA's annotation: a serialized OpSharding."""
OPEN_DIMS = "_autograph_open_dims"
"""The attribute with the dimensions that an annotation leaves open."""
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FRAMEWORKS = tuple(f"{os.sep}{name}{os.sep}" for name in ("tensorflow", "keras", "importlib"))
Part = int | str | None
_PART = r"(?:\d+|model)"
_MARK = re.compile(rf"(?:.*/)?{SCOPE}/(?:split-({_PART}(?:x{_PART}){{0,100}})|(replicate)|assign-(\d+))(?:_\d+)?")


class Mark(NamedTuple):
    """A mark: the parts of each dimension (none: it is not split), or the device.

    Parts are those of `config.split_parts`.
    """

    split: tuple[int, ...] = ()
    device: int = -1


def split(tensor: Any, dims: Sequence[Part]) -> Any:
    """Return a tensor that a model axis splits along each dimension into the parts in `dims`.

    Args:
        tensor: of any shape; if it is a variable, the variable itself is split.
        dims: parts of each dimension; their product is the number of devices on the model axis, for which "model"
            stands. None leaves a dimension open: propagation decides whether it is split.

    Raises:
        GraphError: the tensor has another number of dimensions, or a number of parts is below 1.
    """
    shape = getattr(tensor, "shape", None)
    rank = len(shape) if isinstance(shape, tuple) else getattr(shape, "rank", None)  # Keras and numpy have tuples
    if rank is not None and rank != len(dims):
        problem = f"a tensor of {rank} dimensions cannot be split as {list(dims)}"
        raise GraphError(problem, hint="say a number of parts for each dimension, 1 where it is not cut")
    parts = [read_parts(one) for one in dims]
    if None in parts:
        raise GraphError(f"{list(dims)} are no numbers of parts", hint=HINT)
    return _marked(tensor, "split-" + "x".join("model" if one == MODEL else str(one) for one in parts))


def replicate(tensor: Any) -> Any:
    """Return a tensor that every device of a replica has whole."""
    return _marked(tensor, "replicate")


def assign(tensor: Any, device: int) -> Any:
    """Return a tensor that one logical device of each replica computes.

    Raises:
        GraphError: the number is below 0.
    """
    if device < 0:
        raise GraphError(f"there is no logical device {device}", hint="they count from 0")
    return _marked(tensor, f"assign-{device}")


def _marked(tensor: Any, name: str) -> Any:
    """Return an identity of a tensor, under a name, with the line of the program that made the mark."""
    import tensorflow as tf

    made = tf.identity(tensor, name=f"{SCOPE}/{name}")
    if isinstance(made, tf.Tensor) and not tf.executing_eagerly():
        made.op._set_attr(PLACE, tf.compat.v1.AttrValue(s=_line_of(made.op.traceback).encode()))
    return made


def _line_of(traceback: Any) -> str:
    """Return the innermost line outside of this package and the frameworks, as file:line."""
    frames = [(frame.filename, frame.lineno) for frame in traceback]
    for file, line in reversed(frames):
        if not file.startswith(_OWN) and not any(name in file for name in _FRAMEWORKS):
            return f"{file}:{line}"
    return ""


def mark_of(node: str) -> Mark | None:
    """Return the mark in the name of a node, None if it is no mark."""
    found = _MARK.fullmatch(node) if SCOPE in node else None
    if found is None:
        return None
    parts, _, device = found.groups()
    dims = tuple(MODEL if one == "model" else int(one) for one in parts.split("x")) if parts else ()
    return Mark(dims, int(device) if device else -1)


# Read XLA's OpSharding from the bytes of an attribute, without TensorFlow.
#
#     08 03  1a 02 01 02  22 02 00 01      type OTHER, tile_assignment_dimensions [1, 2], devices [0, 1]
#
# Format: xla_data.proto of XLA (OpSharding); `xla_sharding.split`, `tile`, `partial_tile`, `mesh_split`, `replicate`
# and `assign_device` write it.

REPLICATED, MAXIMAL, TUPLE, OTHER, MANUAL, UNKNOWN = range(6)
_TYPE, _DIMENSIONS, _DEVICES, _PARTS, _REPLICATES_LAST, _LAST_TYPES = 1, 3, 4, 5, 6, 8
_RESHAPED, _TRANSPOSED = 9, 10
_LISTS = (_DIMENSIONS, _DEVICES, _LAST_TYPES, _RESHAPED, _TRANSPOSED)


@dataclass(frozen=True)
class OpSharding:
    """The sharding of an op's output.

    Attributes:
        type: one of the constants above.
        tiles: the number of tiles along each dimension of the tensor, without the additional last dimensions.
        devices: the device of each tile, last dimension fastest.
        copies: the number of devices that have each tile.
        parts: the shardings of an op's outputs (TUPLE).
    """

    type: int = REPLICATED
    tiles: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    copies: int = 1
    parts: tuple[OpSharding, ...] = ()

    @property
    def is_manual(self) -> bool:
        """Whether the program splits the value itself, with ops that see one shard."""
        return self.type == MANUAL or any(part.is_manual for part in self.parts)

    def of(self, index: int) -> OpSharding:
        """Return the sharding of one output of an op."""
        if self.type != TUPLE:
            return self
        return self.parts[index] if index < len(self.parts) else OpSharding()


def read_op_sharding(data: bytes) -> OpSharding:
    """Return a sharding from its bytes.

    Raises:
        ValueError: the bytes are no OpSharding.
    """
    numbers: dict[int, list[int]] = {field: [] for field in _LISTS}
    kind, is_partial, parts = REPLICATED, False, []
    try:
        for field, wire, _, start, stop in fields(data):
            if field in _LISTS:
                numbers[field] += _packed(data, start, stop) if wire == LENGTH_DELIMITED else [_one(data, start)]
            elif field == _PARTS:
                parts.append(read_op_sharding(data[start:stop]))
            elif field == _TYPE:
                kind = _one(data, start)
            elif field == _REPLICATES_LAST:
                is_partial = bool(_one(data, start))
    except IndexError:
        raise ValueError("a number is cut off") from None
    tiles, devices = tuple(numbers[_DIMENSIONS]), tuple(numbers[_DEVICES])
    if kind != OTHER:
        return OpSharding(kind, tiles, devices, parts=tuple(parts))
    last = numbers[_LAST_TYPES] or [REPLICATED] * is_partial
    rank = len(tiles) - len(last)
    return OpSharding(
        MANUAL if MANUAL in last else OTHER,
        tiles[:rank],
        devices or _iota(numbers[_RESHAPED], numbers[_TRANSPOSED]),
        math.prod(tiles[rank:]),
        tuple(parts),
    )


def _one(data: bytes, at: int) -> int:
    return read_varint(data, at)[0]


def _packed(data: bytes, at: int, end: int) -> list[int]:
    found = []
    while at < end:
        number, at = read_varint(data, at)
        found.append(number)
    return found


def _iota(dims: list[int], order: list[int]) -> tuple[int, ...]:
    """Return 0, 1, ... as an array of these dimensions, transposed by `order` and flattened."""
    strides = [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]
    found = [0] if dims else []
    for dim in order:
        found = [number + step * strides[dim] for number in found for step in range(dims[dim])]
    return tuple(found)
