"""Placement: how a value is spread along an axis of the mesh, and Extent: how blocks count a length."""

from __future__ import annotations

from typing import NamedTuple

REPLICA, MICRO, PROCESS = "replica", "micro", "process"
MODEL, STAGE, SERVER, SHARD = "model", "stage", "server", "shard"
AXES = (REPLICA, MICRO, MODEL, STAGE, SERVER, SHARD, PROCESS)
"""Along which values and instances may lie; a model axis that is itself a mesh has several, `model_0`, `model_1`.
Nodes have places along the stages of a pipeline, the logical devices of a replica (`model`), and the devices that all
replicas share: those that hold variables, and hosts (`server`)."""


class Extent(NamedTuple):
    """How the blocks along an axis count a length.

    Attributes:
        axis: of the mesh.
        units: how many there are in all; None where only the run will tell: an open batch.
        sizes: units of each block, of which none is empty; None where the graph computes them: the blocks of a batch.
    """

    axis: str = REPLICA
    units: int | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the sizes of the blocks are: channels may be split, and windows may read rows of neighbours."""
        return self.sizes is not None


class Placement(NamedTuple):
    """Where a value lives along one axis; its instances are those of the replicas, or the devices of a model axis.

    kind          meaning
    replicated    every instance holds the same value
    split         instance k holds the k-th block of dimension `dim`
    partial       the value is the `op` (sum, max, min, prod) over the instances' values
    local         an integer that counts this instance's block (a size); or a shape vector with such entries
    any           an empty container: compatible with whatever is put in
    unknown       not reached yet (inside a loop, before the fixpoint)

    `extent` is how its blocks are counted where it differs; None: as those of the batch.
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
        """Whether replicas hold different values, so that each needs its own instance."""
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
    """Return the placement of a value whose dimension `dim` is cut into blocks."""
    return Placement("split", dim)
