"""Reduce many small gradients with one collective.

    before   CollectiveReduceV2(%dw1)   CollectiveReduceV2(%dw2)
    after    CollectiveReduceV2(Concat(flat %dw1, flat %dw2)) ──SplitV──► dw1, dw2

A bucket is filled in the order in which the backward pass produces its members, so that it can leave while the rest is
still being computed. Members must be ready together: none may depend on the reduction of another, and none may be in a
loop or a branch. What the processes tell each other of sizes and digests may ride along (`resolve.buckets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes.base.context import Context
from autograph_rewrite.passes.collectives.all_reduce import contribution, sum_of_members
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.passes.collectives.packing import Packing
from autograph_rewrite.passes.collectives.wire_values import cast
from autograph_rewrite.passes.compression.compress import reduce_compressed
from autograph_rewrite.plan.parts.messages import EdgePlan


def reduce_bucket(
    context: Context, members: Sequence[tuple[Value, EdgePlan]], keys: Keys, riding: Blocks | None = None
) -> Iterable[tuple[Value, Value]]:
    """Reduce several partial values with one collective; return each with its sum.

    Args:
        context: the rewrite.
        members: partial values with their edges, of one element type.
        keys: makes the collective's keys.
        riding: blocks whose sizes and digests ride along; None: they do not.
    """
    values = [value for value, _ in members]
    exchanges = [Exchange(context, keys, edge) for _, edge in members]
    name = f"autograph_bucket_{members[0][1].bucket}"
    if members[0][1].compressor != NONE:
        return zip(values, reduce_compressed(exchanges, values, name), strict=True)
    sent = [
        contribution(one, context.current(value), context.fact(value), one.planned.lowered.hops[:-1])
        for one, value in zip(exchanges, values, strict=True)
    ]
    packing = Packing(context, values, name, [riding.row_length] if riding is not None else [])
    rows = [riding.row_in_halves(sent[0].dtype)] if riding is not None else []
    total = sum_of_members(exchanges[0], packing.join([*sent, *rows]), name)
    parts = packing.split(total, sent[0])
    if riding is not None:
        riding.take_halves(parts.pop())
    sums = [
        cast(context, whole, context.fact(value).dtype, f"{value.node.name}/narrow")
        for value, whole in zip(values, parts, strict=True)
    ]
    return zip(values, sums, strict=True)
