"""Placement: how a value is spread over the replicas."""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """Where a value lives on the `data` axis.

    kind          meaning
    replicated    every replica holds the same value
    split         replica k holds the k-th block of dimension `dim`
    partial       the value is the `op` (sum, max, min, prod) over the replicas' values
    local         an integer that counts this replica's block (a size); or a shape vector with such entries
    any           an empty container: compatible with whatever is put in
    unknown       not reached yet (inside a loop, before the fixpoint)
    """

    kind: str
    dim: int = 0
    op: str = ""

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
