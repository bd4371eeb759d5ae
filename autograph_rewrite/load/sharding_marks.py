"""Placements on the model axis in a user's own layers, as names that the graph keeps and TensorFlow ignores.

    h = ar.split(h, [1, 2])      an identity .../autograph_sharding/split-1x2: the second dimension is cut in two
    w = ar.replicate(w)          .../autograph_sharding/replicate: every device of a replica sees all of it
    t = ar.assign(t, 1)          .../autograph_sharding/assign-1: logical device 1 makes it

Where a configuration has no model axis, they are identities. XLA has the same three as `xla_sharding.split`,
`replicate` and `assign`; their checks and the order of these are those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from autograph_rewrite.errors import GraphError

SCOPE = "autograph_sharding"
_MARK = re.compile(rf"(?:.*/)?{SCOPE}/(?:split-(\d+(?:x\d+)*)|(replicate)|assign-(\d+))(?:_\d+)?")


class Mark(NamedTuple):
    """What a mark says: into how many parts each dimension is cut (none: not at all), or on which device it is."""

    split: tuple[int, ...] = ()
    device: int = -1


def split(tensor: Any, dims: Sequence[int]) -> Any:
    """Return a tensor, cut into as many parts along each dimension as `dims` says where there is a model axis.

    Args:
        tensor: of any shape; a variable is cut itself.
        dims: parts of each dimension; their product is the number of devices on the model axis.

    Raises:
        GraphError: the tensor has another number of dimensions, or a number of parts is below 1.
    """
    import tensorflow as tf

    rank = getattr(getattr(tensor, "shape", None), "rank", None)
    if rank is None and hasattr(tensor, "shape") and tensor.shape is not None:
        rank = len(tensor.shape)
    if rank is not None and rank != len(dims):
        problem = f"a tensor of {rank} dimensions cannot be split as {list(dims)}"
        raise GraphError(problem, hint="say a number of parts for each dimension, 1 where it is not cut")
    if any(parts < 1 for parts in dims):
        raise GraphError(f"{list(dims)} are no numbers of parts", hint="they begin at 1")
    return tf.identity(tensor, name=f"{SCOPE}/split-{'x'.join(map(str, dims))}")


def replicate(tensor: Any) -> Any:
    """Return a tensor of which every device of a replica sees all."""
    import tensorflow as tf

    return tf.identity(tensor, name=f"{SCOPE}/replicate")


def assign(tensor: Any, device: int) -> Any:
    """Return a tensor that one logical device of each replica makes.

    Raises:
        GraphError: the number is below 0.
    """
    import tensorflow as tf

    if device < 0:
        raise GraphError(f"there is no logical device {device}", hint="they count from 0")
    return tf.identity(tensor, name=f"{SCOPE}/assign-{device}")


def mark_of(node: str) -> Mark | None:
    """Return what the name of a node says, None where it is no mark."""
    found = _MARK.fullmatch(node) if SCOPE in node else None
    if found is None:
        return None
    parts, _, device = found.groups()
    return Mark(tuple(map(int, parts.split("x"))) if parts else (), int(device) if device else -1)
