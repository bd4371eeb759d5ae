"""Exchange values by ordinary ops: those of a process's replicas, or of a replica's micro-batches, become one.

reduce   AddN(all(%dw))          Max(Pack(all(%x)), 0)
gather   ConcatV2(all(%x), dim)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import ONCE, Select, Span
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.rules.base import Slice
from autograph_rewrite.ops.traits import REDUCED_BY
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.names import EDGE_ATTR


def reduce_local(rewrite: Rewrite, value: Value, op: str, name: str, role: str = "", *, span: Span = ONCE) -> Value:
    """Combine the values of this process's replicas on its first device, or those of each replica's micro-batches.

    Args:
        value: contributions, one per instance.
        op: the reduction.
        name: prefix of the names of new nodes.
        role: of the edge, if its value has several edges.
        span: of the result: ONCE, or PER_REPLICA to combine micro-batches only.
    """
    span = rewrite.of_all if span == ONCE else span
    count = rewrite.mesh.taken(span, value.node.span)
    if count == 1:
        return rewrite.once(value) if span == rewrite.of_all else value

    build = FoldedBuilder.of(rewrite, value, name, span=span)
    if op == "sum":
        tag: dict[str, Any] = {EDGE_ATTR: role} if role else {}
        return build.op("AddN", value, what="add_n", gather=(0,), N=count, **tag)
    stack = build.op("Pack", value, what="pack", gather=(0,), N=count, axis=0)
    axis = rewrite.const(0, np.int32, name=f"{name}/axis", near=stack)
    return build.op(REDUCED_BY[op], stack, axis, what="fold")


def gather_local(rewrite: Rewrite, value: Value, fact: Fact) -> Value:
    """Join the blocks of this process's replicas on its first device."""
    if rewrite.mesh.taken(rewrite.of_all, value.node.span) == 1:
        return rewrite.once(value)
    dim, rank, name = fact.placement.dim, fact.rank, value.node.name
    if not dim or rank is None or not rewrite.plan.looped:
        return joined(rewrite, value, dim, name)
    others = [axis for axis in range(rank) if axis != dim]  # a loop joins along the first dimension only
    build = FoldedBuilder.of(rewrite, value)
    ahead = transposed(value, [dim, *others], build, "ahead", "ahead_order")
    whole, back = joined(rewrite, ahead, 0, name), np.argsort([dim, *others]).tolist()
    return transposed(whole, back, replace(build, span=whole.node.span), "back", "back_order")


def joined(rewrite: Rewrite, value: Value, dim: int, name: str) -> Value:
    """Return the concatenated instances of a value.

    Args:
        dim: along which they are joined.
        name: prefix of the nodes' names.
    """
    build = FoldedBuilder.of(rewrite, value, name)
    return build.gather("ConcatV2", value, build.numbers(dim, "axis"), what="concat")


def gather_among_peers(rewrite: Rewrite, value: Value, block: Slice, node: Node) -> Value:
    """Join the blocks of this process's replicas on every device, which reads the blocks of the others.

    Args:
        value: blocks, one on each replica.
        block: how the whole is cut into them.
        node: the reshard; the new nodes have its span and its name as a prefix.
    """
    build = FoldedBuilder.of(rewrite, value, node.name, span=node.span)
    axis, count = build.numbers(block.dim, "axis"), rewrite.mesh.taken(node.span, value.node.span, Select.EVERY)
    return build.from_all("ConcatV2", value, axis, what="all_gather", select=Select.EVERY, N=count)


def cut_shard(rewrite: Rewrite, whole: Value, block: Slice, node: Node) -> Value:
    """Cut the shard of each replica out of the whole, which every replica has.

    Args:
        block: how the whole is cut into shards.
        node: the reshard; the new nodes have its span and its name as a prefix.
    """
    build = FoldedBuilder.of(rewrite, whole, node.name, span=node.span)
    starts = [block.unit * start for start in accumulate(block.shards, initial=0)]
    before = [0] * block.dim

    def limits(entries: Sequence[int], what: str) -> Value:
        return build.of_replicas([[*before, entry] for entry in entries], np.int32, what)

    step = build.numbers([1] * (block.dim + 1), "step")
    all_before = (1 << block.dim) - 1
    return build.op(
        "StridedSlice", whole, limits(starts[:-1], "begin"), limits(starts[1:], "end"), step, what="shard",
        begin_mask=all_before, end_mask=all_before,
    )  # fmt: skip


def scatter_among_peers(rewrite: Rewrite, value: Value, block: Slice, node: Node) -> Value:
    """Let each replica add up its block of the contributions of all replicas of this process.

    Args:
        value: contributions, one per instance.
        block: how the whole is cut into blocks.
        node: the reshard; the new nodes have its span and its name as a prefix.
    """
    value = reduce_local(rewrite, value, "sum", node.name, span=node.span)  # over the micro-batches of each replica
    build = FoldedBuilder.of(rewrite, value, node.name, span=node.span)
    sizes = build.numbers([size * block.unit for size in block.shards], "sizes")
    blocks = build.op(
        "SplitV", value, sizes, build.numbers(block.dim, "axis"), what="blocks", num_split=len(block.shards)
    )
    count = rewrite.mesh.taken(node.span, blocks.node.span, Select.OWN)
    return build.from_all("AddN", blocks, what="add_n", select=Select.OWN, N=count)


PEERS: Mapping[Operation, Callable[..., Value]] = {
    Operation.GATHER: gather_among_peers,
    Operation.SCATTER: scatter_among_peers,
}
"""By operation, the function that emits a hop among devices that share a memory."""


def transposed(value: Value, order: Sequence[int], build: FoldedBuilder, what: str, operand: str) -> Value:
    """Return a value with its dimensions in another order.

    Args:
        order: the dimensions of `value` in their new order.
        what: name of the result, after the builder's.
        operand: name of the constant with the order.
    """
    dims = build.rewrite.const(list(order), np.int32, name=f"{build.name}/{operand}", near=value)
    return build.op("Transpose", value, dims, what=what)
