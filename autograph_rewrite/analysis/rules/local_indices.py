"""Ops whose row indices count within the local block, where a pass has seen that nobody looks into another one.

    block of positions + first row of each example, counted in the block ──► Gather(block of rows) ──► block

The numbers mean something together with rows of the same block only (`passes.localize_indices`). The gradient of such a
look-up adds rows up where they were found, so it stays in the block, too.
"""

from __future__ import annotations

from autograph_rewrite.analysis.dims import is_local
from autograph_rewrite.analysis.fact import REPLICATED, Placement, split
from autograph_rewrite.analysis.rules.base import Op, Placed, whole

LOCAL_INDICES = "_autograph_local_indices"
"""The attribute that marks the numbers, and what looks up by them."""


def place_local_indices(n: Op) -> Placed:
    """Leave each replica its block; where nothing is cut, work on whole values."""
    made = _made(n)
    if made is None:
        placed = whole(n)
        cut = any(fact.placement.is_split for fact in n.inputs)
        return placed._replace(decompose=cut)  # nothing does that, so it is an error
    sizes = {"Range": (1,), "UnsortedSegmentSum": (2,)}.get(n.op, ())
    kept = {i for i, fact in enumerate(n.inputs) if fact.placement.is_split} | set(sizes)
    wants = {i: REPLICATED for i, fact in enumerate(n.inputs) if i not in kept and fact.placement.differs}
    return Placed((made,), wants)


def _made(n: Op) -> Placement | None:
    """Return the placement of the result; None where the inputs are no blocks that belong together."""
    rows, numbers = n.inputs[:2]
    if n.op == "Range":
        limit = n.value(1)
        return split(0) if limit is not None and is_local(limit[0]) else None
    if not numbers.placement.is_split or numbers.placement.dim != 0 or rows.placement != split(0):
        return None
    if n.op == "UnsortedSegmentSum":
        count = n.value(2)
        return split(0) if count is not None and is_local(count[0]) else None
    return split(0)
