"""Exchanges by ordinary ops: what the replicas of a process, or the micro-batches of a replica, hold becomes one value.

reduce   AddN(all(%dw))          Max(Pack(all(%x)), 0)
gather   ConcatV2(all(%x), dim)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.mesh import ONCE, Span
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.traits import REDUCED_BY
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.parts.names import ROLE_ATTR

"""By reduction, the op that does it along an axis."""


def reduce_local(rewrite: Rewrite, value: Value, op: str, name: str, role: str = "", *, span: Span = ONCE) -> Value:
    """Combine the values of this process's replicas on its first device, or those of each replica's micro-batches.

    Args:
        value: contributions, each.
        op: the reduction.
        name: prefix of the names of new nodes.
        role: of the edge, where a value has several.
        span: how often there is a result: ONCE, or once for each REPLICA.
    """
    count = rewrite.taken(span, value.node.span)
    if count == 1:
        return rewrite.once(value) if span == ONCE else value

    build = FoldedBuilder.of(rewrite, value, name, span=span)
    if op == "sum":
        tag: dict[str, Any] = {ROLE_ATTR: role} if role else {}
        return build.op("AddN", value, what="add_n", gather=(0,), N=count, **tag)
    stack = build.op("Pack", value, what="pack", gather=(0,), N=count, axis=0)
    axis = rewrite.const(0, np.int32, name=f"{name}/axis", near=stack)
    return build.op(REDUCED_BY[op], stack, axis, what="fold")


def gather_local(rewrite: Rewrite, value: Value, fact: Fact) -> Value:
    """Join the blocks of this process's replicas on its first device."""
    if rewrite.local == 1:
        return rewrite.once(value)
    dim, rank, name = fact.placement.dim, fact.rank, value.node.name
    if not dim or rank is None or not rewrite.plan.looped:
        return joined(rewrite, value, dim, name)
    others = [axis for axis in range(rank) if axis != dim]  # a loop joins what it makes along the first dimension only
    build = FoldedBuilder.of(rewrite, value)
    ahead = transposed(value, [dim, *others], build, "ahead", "ahead_order")
    whole, back = joined(rewrite, ahead, 0, name), np.argsort([dim, *others]).tolist()
    return transposed(whole, back, replace(build, span=whole.node.span), "back", "back_order")


def joined(rewrite: Rewrite, value: Value, dim: int, name: str) -> Value:
    """Return the instances of a value one behind the other.

    Args:
        value: of each instance.
        dim: along which they are joined.
        name: prefix of the nodes' names.
    """
    build = FoldedBuilder.of(rewrite, value, name)
    return build.gather("ConcatV2", value, build.numbers(dim, "axis"), what="concat")


def transposed(value: Value, order: Sequence[int], build: FoldedBuilder, what: str, operand: str) -> Value:
    """Return a value with its dimensions in another order.

    Args:
        value: of any rank.
        build: adds the nodes.
        what: name of the value, behind the builder's.
        operand: name of the order.
    """
    dims = build.rewrite.const(list(order), np.int32, name=f"{build.name}/{operand}", near=value)
    return build.op("Transpose", value, dims, what=what)
