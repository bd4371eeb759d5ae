"""Fact: what is known about one value before rewriting (placement, local shape, small integer contents)."""

from __future__ import annotations

from typing import NamedTuple

from autograph_rewrite.ir.types.placement import ANY, LOCAL, PARTIAL, REPLICATED, UNKNOWN, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, is_segmented

__all__ = ["ANY", "LOCAL", "PARTIAL", "REPLICATED", "UNKNOWN", "Axes", "Fact", "Placement", "Shape", "split"]


Shape = tuple[Dim, ...]


class Axes(NamedTuple):
    """Dimensions of which a vector names some: certainly all of `sure`, and none that is not `possible`."""

    sure: frozenset[int]
    possible: frozenset[int]


class Fact(NamedTuple):
    """What is known about a value.

    Attributes:
        placement: where it lives.
        dtype: TensorFlow's number of the element type.
        shape: the shape of ONE instance (block sizes contain `b`); None for an unknown rank. Of a container
            (tensor list, tensor array, stack) it is the shape of its elements.
        value: contents of a small integer tensor, flat; entries may be symbolic or None. None: not tracked.
        zero: every element is known to be zero, so a replicated value is also a partial one.
        cell: for a handle of a tensor array or stack, the node that made it.
        axes: of a vector of dimensions that only the run will tell, what is known of it.
    """

    placement: Placement
    dtype: int
    shape: Shape | None = None
    value: tuple[Dim, ...] | None = None
    zero: bool = False
    cell: str = ""
    axes: Axes | None = None

    @property
    def rank(self) -> int | None:
        """Number of dimensions, None when unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_local(self) -> bool:
        """Whether it is a size of this replica's block."""
        return self.placement.kind == "local"

    @property
    def is_segmented(self) -> bool:
        """Whether it is a block with segments, or tells the size of one."""
        return any(is_segmented(dim) for dim in (*(self.shape or ()), *(self.value or ())))

    @property
    def split_size(self) -> Dim:
        """The size of the split dimension of one block."""
        if not self.placement.is_split or self.shape is None or self.placement.dim >= len(self.shape):
            return None
        return self.shape[self.placement.dim]
