"""Marked ops whose row indices are relative to the local block: no index leaves its block.

    block of positions + first row of each example, counted in the block ──► Gather(block of rows) ──► block
    block of a mask ──► Where ──► Gather(block of rows) ──► the rows of the block that are kept

The numbers mean something together with rows of the same block only: `passes.localize.localize_indices`,
`passes.localize.localize_kept_rows`. The gradient of such a look-up adds rows up where they were found, so it stays in
the block, too.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import is_local
from autograph_rewrite.ops.rules.base import Op, Placed, others_whole, whole
from autograph_rewrite.ops.traits import has, operands

LOCAL_INDICES = "_autograph_local_indices"
"""The attribute that marks the numbers, and what looks up by them."""


def place_local_indices(n: Op) -> Placed:
    """Leave each replica its block; where nothing is cut, work on whole values."""
    made = _made(n)
    if made is None:
        placed = whole(n)
        cut = any(fact.placement.is_split for fact in n.inputs)
        return placed._replace(decompose=cut)  # nothing does that, so it is an error
    kept = {i for i, fact in enumerate(n.inputs) if fact.placement.is_split} | set(operands(n.op, "given_size"))
    return Placed((made,), others_whole(n, *kept))


def _made(n: Op) -> Placement | None:
    """Return the placement of the result; None where the inputs are no blocks that belong together."""
    if n.op == "Where":
        return split(0) if n.placement(0) == split(0) and n.rank(0) == 1 else None
    rows, numbers = n.inputs[:2]
    if n.op == "Range":
        limit = n.value(1)
        return split(0) if limit is not None and is_local(limit[0]) else None
    if not numbers.placement.is_split or numbers.placement.dim != 0 or rows.placement != split(0):
        return None
    if has(n.op, "adds_rows"):
        count = n.value(2)
        return split(0) if count and is_local(count[0]) else None
    return split(0)
