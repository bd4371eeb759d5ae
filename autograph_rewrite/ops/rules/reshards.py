"""Reshards that passes insert before other conversions: to the whole value, a shard, or another value's placement."""

from __future__ import annotations

from autograph_rewrite.ir.types.opdefs import RESHARD, SHARD_ALIKE, is_over
from autograph_rewrite.ir.types.placement import REPLICA
from autograph_rewrite.ops.facts.placement import REPLICATED, Shape, split
from autograph_rewrite.ops.rules.base import (
    Op,
    Placed,
    Rule,
    Slice,
    block_of,
    first_value,
    like_first,
    made_whole,
    whole,
)


def _place(n: Op) -> Placed:
    """Convert the value to the whole, or to shards."""
    if not is_over(n, REPLICA):
        return _place_elsewhere(n)
    shards = tuple(n.attr("shards", ()))
    if not shards:
        return whole(n)
    return Placed((split(n.attr("dim")),), {0: Slice(n.attr("dim"), 1, shards=shards)})


def _place_elsewhere(n: Op) -> Placed:
    """Keep a split along another dimension, or a sum: along another axis, the reshard moves or adds elements."""
    placement, is_cut = n.placement(0), bool(n.attr("shards", ()))
    if placement.is_split and not (is_cut and placement.dim == n.attr("dim")):
        return Placed((placement,))
    texts = n.attr("before"), n.attr("after")
    others = [text for text in texts if b"partial" in text and b"partial(sum)" not in text]
    if placement.is_partial and placement.op == "sum" and not others:
        return Placed((placement,))
    return whole(n)


def _shape(n: Op) -> tuple[Shape | None, ...]:
    shape, sizes, dim = n.shape(0), tuple(n.attr("shards", ())), n.attr("dim")
    if is_over(n, REPLICA) or not sizes or shape is None:
        return (shape,)
    rows = n.attr("rows", ())  # the rows that a window reads, including those of neighbours
    size = rows[1] - rows[0] if rows else sum(sizes) if b"split" in n.attr("before") else sizes[0]
    return ((*shape[:dim], size, *shape[dim + 1 :]),)


def _alike(n: Op) -> Placed:
    """Split the value like the other one; if that is not split, make the value whole."""
    like = n.inputs[1]
    block = block_of(like.placement.dim, like.split_size) if like.placement.is_split else None
    if block is None:
        return Placed((REPLICATED,), made_whole(n, 0))
    return Placed((like.placement,), {0: block})


RULES: dict[str, Rule] = {
    RESHARD: Rule(_place, _shape, lambda n: first_value(n) if is_over(n, REPLICA) else (None,)),
    SHARD_ALIKE: Rule(_alike, like_first),
}
