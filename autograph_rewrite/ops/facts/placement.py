"""Defines Fact: the abstract value of a tensor before rewriting (placement, local shape, small integer contents)."""

from __future__ import annotations

from typing import NamedTuple

from autograph_rewrite.ir.mesh import REPLICA
from autograph_rewrite.ir.types.placement import ANY, LOCAL, PARTIAL, REPLICATED, UNKNOWN, Extent, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, is_segmented, on_axis

__all__ = ["ANY", "LOCAL", "PARTIAL", "REPLICATED", "UNKNOWN", "Axes", "Extent", "Fact", "Placement", "Shape", "split"]


Shape = tuple[Dim, ...]


class Axes(NamedTuple):
    """The dimensions that a vector names: certainly all of `sure`, and none that is not in `possible`."""

    sure: frozenset[int]
    possible: frozenset[int]


class Fact(NamedTuple):
    """The abstract value of a tensor.

    Attributes:
        placement: along the batch's axis.
        dtype: TensorFlow's number of the element type.
        shape: the shape of ONE instance (block sizes contain `b`); None for an unknown rank. For a container
            (tensor list, tensor array, stack) it is the shape of its elements.
        value: contents of a small integer tensor, flat; entries may be symbolic or None. None: not tracked.
        zero: every element is known to be zero, so a replicated value is also a partial one.
        cell: for a handle of a tensor array or stack, the node that made it.
        axes: bounds on a vector of dimensions that is known at run time only.
        others: placements along other axes than the batch's, in the order of the mesh; replicated is left out.
            Placements have their extents; sizes of their blocks are `T:@model/b` in `shape` and `value`.
        held: the value depends only on a variable that is stored in these blocks: other operands are converted to it.
    """

    placement: Placement
    dtype: int
    shape: Shape | None = None
    value: tuple[Dim, ...] | None = None
    zero: bool = False
    cell: str = ""
    axes: Axes | None = None
    others: tuple[tuple[str, Placement], ...] = ()
    held: bool = False

    @property
    def placements(self) -> dict[str, Placement]:
        """Its placements by axis; replicated is left out."""
        here = {} if self.placement == REPLICATED else {REPLICA: self.placement}
        return here | dict(self.others)

    def placement_on(self, axis: str) -> Placement:
        """Return its placement along an axis."""
        if axis == REPLICA:
            return self.placement
        return next((one for name, one in self.others if name == axis), REPLICATED)

    def on(self, axis: str, before: str = REPLICA) -> Fact:
        """Return the fact as rules on an axis see it, with the block sizes of other axes as open sizes.

        Args:
            axis: whose block sizes become `b`.
            before: the axis whose block sizes are `b` now; `fact.on(axis).on(REPLICA, axis)` equals the fact.
        """
        if axis == before:
            return self
        shape = None if self.shape is None else tuple([on_axis(dim, axis, before) for dim in self.shape])
        value = None if self.value is None else tuple([on_axis(dim, axis, before) for dim in self.value])
        return self._replace(shape=shape, value=value)

    def placed(self, axis: str, placement: Placement) -> Fact:
        """Return the fact with another placement along an axis."""
        if axis == REPLICA:
            return self._replace(placement=placement)
        others = {**dict(self.others), axis: placement}
        return self._replace(others=tuple((name, one) for name, one in others.items() if one != REPLICATED))

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
        """Whether it is a block with segments, or contains the size of one."""
        return any(is_segmented(dim) for dim in (*(self.shape or ()), *(self.value or ())))

    @property
    def split_size(self) -> Dim:
        """The size of the split dimension of one block."""
        if not self.placement.is_split or self.shape is None or self.placement.dim >= len(self.shape):
            return None
        return self.shape[self.placement.dim]
