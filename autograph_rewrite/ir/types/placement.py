"""Defines Placement: how a value is spread along an axis of the mesh, and Extent: how blocks count a length."""

from __future__ import annotations

from typing import NamedTuple

REPLICA, MICRO, PROCESS = "replica", "micro", "process"
MODEL, STAGE, SERVER, SHARD = "model", "stage", "server", "shard"
AXES = (REPLICA, MICRO, MODEL, STAGE, SERVER, SHARD, PROCESS)
"""The axes of a mesh; a model axis that is itself a mesh has several, `model_0`, `model_1`.
Nodes have places along the stages of a pipeline, the logical devices of a replica (`model`), and the devices that all
replicas share: those that hold variables, and hosts (`server`)."""


class Extent(NamedTuple):
    """How the blocks along an axis count a length.

    Attributes:
        axis: of the mesh.
        units: their total number; None for a batch whose size is known at run time only.
        sizes: units of each block, none of which is empty; None for the blocks of a batch, which the graph computes.
    """

    axis: str = REPLICA
    units: int | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the block sizes are known: then channels may be split, and windows may read rows of neighbours."""
        return self.sizes is not None


class Placement(NamedTuple):
    """How a value is spread along one axis: over the replicas, or over the devices of a model axis.

    kind          meaning
    replicated    every instance holds the same value
    split         instance k holds the k-th block of dimension `dim`
    partial       the value is the `op` (sum, max, min, prod) over the instances' values
    local         an integer that counts this instance's block (a size); or a shape vector with such entries
    any           an empty container: compatible with any value that is put in
    unknown       not reached yet (inside a loop, before the fixpoint)

    `extent` says how its blocks are counted; None: like the blocks of the batch.
    """

    kind: str
    dim: int = 0
    op: str = ""
    extent: Extent | None = None

    @property
    def is_split(self) -> bool:
        """Whether replicas hold blocks."""
        return self.kind == "split"

    @property
    def is_partial(self) -> bool:
        """Whether replicas hold contributions."""
        return self.kind == "partial"

    @property
    def differs(self) -> bool:
        """Whether replicas hold different values, so that each needs an instance."""
        return self.kind in ("split", "partial", "local")

    def __repr__(self) -> str:
        if self.kind == "split":
            return f"split({self.dim})"
        return f"partial({self.op})" if self.kind == "partial" else self.kind


REPLICATED = Placement("replicated")
PARTIAL = Placement("partial", op="sum")
LOCAL = Placement("local")
ANY = Placement("any")
UNKNOWN = Placement("unknown")


def split(dim: int) -> Placement:
    """Return the placement of a value whose dimension `dim` is split into blocks."""
    return Placement("split", dim)
