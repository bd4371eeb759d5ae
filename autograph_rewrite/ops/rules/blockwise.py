"""Marked ops that run on each block by itself although their results are no blocks of the global result.

    block of ids ──► Where (in this shard) ──► rows of the shard ──► DynamicStitch ──► block of the rows

What is found in one block says nothing about the whole, but is used for that block only; the last op of such a chain
brings it back into the order of the block. All of a chain is cut or none of it: a link that gets both is refused.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import split
from autograph_rewrite.ops.facts.symbolic_dims import is_local
from autograph_rewrite.ops.rules.base import Op, Placed, whole

BLOCKWISE = "_autograph_blockwise"
"""The attribute that marks them."""


def place_blockwise(n: Op) -> Placed:
    """Leave each replica its block; where nothing is cut, or not by rows, work on whole values."""
    by_rows = [fact.placement == split(0) for fact in n.inputs]
    if not by_rows[0]:
        placed = whole(n)  # of columns, too, which a model axis may cut
        return placed._replace(decompose=any(by_rows[1:]))  # nothing does that, so it is an error
    if n.op != "Reshape" or n.rank(1) != 1:
        return Placed((split(0),) * len(n.output_dtypes))
    local = [i for i, entry in enumerate(n.value(1) or ()) if is_local(entry)]
    return Placed((split(local[0] if local else 0),))
