"""What a pass asks for before conversions are made: the whole of a value, a shard of it, or what another value has."""

from __future__ import annotations

from autograph_rewrite.ir.types.opdefs import RESHARD, SHARD_ALIKE
from autograph_rewrite.ops.facts.placement import REPLICATED, split
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, Slice, block_of, first_value, like_first, whole


def _place(n: Op) -> Placed:
    """A value is asked for whole, or as shards."""
    shards = tuple(n.attr("shards", ()))
    if not shards:
        return whole(n)
    return Placed((split(n.attr("dim")),), {0: Slice(n.attr("dim"), 1, shards=shards)})


def _alike(n: Op) -> Placed:
    """A value is split as the other one is; where that is not split, the value is whole."""
    value, like = n.inputs
    block = block_of(like.placement.dim, like.split_size) if like.placement.is_split else None
    if block is None:
        return Placed((REPLICATED,), {0: REPLICATED} if value.placement.differs else {})
    return Placed((like.placement,), {0: block})


RULES: dict[str, Rule] = {
    RESHARD: Rule(_place, like_first, first_value),
    SHARD_ALIKE: Rule(_alike, like_first),
}
