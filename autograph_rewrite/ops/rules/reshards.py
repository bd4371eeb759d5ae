"""`ar.reshard`: what a pass asks for before conversions are made: the whole of a value, or a shard of it."""

from __future__ import annotations

from autograph_rewrite.ir.types.opdefs import RESHARD
from autograph_rewrite.ops.facts.placement import split
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, Slice, first_value, like_first, whole


def _place(n: Op) -> Placed:
    """A value is asked for whole, or as shards."""
    shards = tuple(n.attr("shards", ()))
    if not shards:
        return whole(n)
    return Placed((split(n.attr("dim")),), {0: Slice(n.attr("dim"), 1, shards=shards)})


RULES: dict[str, Rule] = {RESHARD: Rule(_place, like_first, first_value)}
