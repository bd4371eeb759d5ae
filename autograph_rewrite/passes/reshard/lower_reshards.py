"""Lower each `ar.reshard` to ops, hop by hop, as the edge of the plan says.

    before   %dw/reshard: float32[4,8] = ar.reshard(all(%dw)) {after="replicated", before="partial(sum)", edge=0}
    after    %dw/add_n: float32[4,8] = AddN(all(%dw))                                  shared
             %dw/all_reduce: float32[4,8] = CollectiveReduceV2(%dw, ...)  each         mirrored

The nodes of a lowering take the position of its reshard in the graph. Sums that share a bucket are lowered together,
with the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

import numpy as np

from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, PER_REPLICA, STAGE, Span
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import RESHARD, axis_along
from autograph_rewrite.ops.facts.placement import PARTIAL, Fact
from autograph_rewrite.ops.facts.symbolic_dims import rows_of_unit, rows_per_example, segments
from autograph_rewrite.ops.rules.base import LocalEntry, Slice
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.all_gather import (
    Blocked,
    all_gather,
    gather_between_processes,
    rows_at,
    rows_between,
)
from autograph_rewrite.passes.collectives.all_reduce import (
    all_reduce,
    contribution,
    reduce_between_processes,
    sum_of_members,
)
from autograph_rewrite.passes.collectives.along_model import AlongModel
from autograph_rewrite.passes.collectives.block_bounds import SCOPE, Blocks
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import Keys, stay_in_stages
from autograph_rewrite.passes.collectives.local_ops import PEERS, cut_shard
from autograph_rewrite.passes.collectives.wire_values import Packing, cast
from autograph_rewrite.passes.compression.compress import reduce_compressed
from autograph_rewrite.passes.reshard.global_sizes import global_size
from autograph_rewrite.passes.reshard.insert_reshards import Conversion, Reshards, home_of_edge
from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan
from autograph_rewrite.resolve.stages.assignment import Stages


class LoweredReshards:
    """Lowers reshards, and finds the results.

    Args:
        asked: the reshards that readers need.
        blocks: of the batch; a bucket may also exchange their sizes.
        keys: of collectives.
    """

    def __init__(self, rewrite: Rewrite, asked: Reshards, blocks: Blocks, keys: Keys) -> None:
        self.asked = asked
        self._rewrite, self._blocks, self._keys = rewrite, blocks, keys
        self._made: dict[Value, Value] = {}  # by the result of a reshard
        self._sums: dict[Value, Value] = {}  # of members of buckets, by the value that is summed

    def whole(self, value: Value, reader: Node) -> Value:
        """Return the whole of a value, for a reader that comes after the reshards are lowered."""
        found = self.asked.whole(value, reader)
        if found in self._made:
            return self._made[found]
        return self.lower(found.node) if found.node.op == RESHARD else found

    def lower_all(self) -> None:
        """Lower the reshards that readers have asked for so far, in that order."""
        graph = self._rewrite.graph
        order: dict[Node, list[Node]] = {node: [node] for node in graph}
        for node in self.asked.wanted:
            before = len(graph)
            self.lower(node)
            count = len(graph) - before + 1  # the reshard is gone
            order[node] = [*islice(reversed(graph.nodes.values()), count)][::-1]
        graph.put_in_order(node for nodes in order.values() for node in nodes)

    def lower(self, node: Node) -> Value:
        """Replace a reshard by ops; return their result.

        Raises:
            PassError: an edge cannot be lowered.
        """
        rewrite, old = self._rewrite, node.output()
        new = self._made[old] = self._lowered(node, self.asked.wanted[node])
        if new.node.span != node.span:
            raise PassError(f"'{new.name}' has not as many instances as its reshard promised", node=node)
        placement = rewrite.converted.pop(old, None)
        if placement is not None and new not in rewrite.state.facts:
            rewrite.converted[new] = placement
        _replace_reshard(rewrite, node, new)
        return new

    def _lowered(self, node: Node, asked: Conversion) -> Value:
        rewrite, (source,) = self._rewrite, node.inputs
        value = self._made.get(asked.value, asked.value)
        fact, exchange = rewrite.fact(value), Exchange(rewrite, self._keys, asked.edge)
        if isinstance(asked.wanted, LocalEntry):
            return local_entry(rewrite, value, asked.wanted, asked.blocks)
        if node.controls:
            build = FoldedBuilder.of(rewrite, source, node.name)
            source = build.op("Identity", source, what="awaited", controls=node.controls)
        if asked.edge is not None and asked.edge.lowered.is_among_peers:
            (hop,) = asked.edge.lowered.hops
            each = asked.wanted if isinstance(asked.wanted, Slice) else Slice(fact.placement.dim, 1)
            return PEERS[hop.operation](rewrite, source, each, node)
        if isinstance(asked.wanted, Slice) and asked.wanted.shards:
            return cut_shard(rewrite, source, asked.wanted, node)
        if isinstance(asked.wanted, Slice):
            block = self._piece(source, value, asked.wanted, asked.blocks)
            # In a job, an input is this process's part of the batch, and another whole is that of all processes.
            if rewrite.processes == 1 or self.asked.is_of_input(value, asked.wanted):
                rewrite.slices[block] = source
            return block
        if asked.wanted == PARTIAL:
            return term(rewrite, source, node.span)
        if asked.edge is not None and asked.edge.from_ == "single":
            return reduce_between_processes(exchange, source, "sum", changing=True)
        if value in rewrite.state.whole_inputs:
            part = fact._replace(placement=asked.before)
            return gather_between_processes(exchange, source, Blocked(part, asked.blocks, 1))
        if fact.is_local:
            return global_size(rewrite, value, fact, asked.blocks.batch, self._keys, node.span)
        with rewrite.at(home_of_edge(rewrite, asked.edge)):
            return self._combined(exchange, source, value, fact, asked.blocks)

    def _combined(self, exchange: Exchange, source: Value, value: Value, fact: Fact, blocks: Blocks) -> Value:
        """Return the whole of a value that differs: the sum of contributions, or the joined blocks.

        Args:
            source: the current replacement of `value`.
        """
        edge = exchange.edge
        if not fact.placement.is_partial:
            joined = all_gather(exchange, source, Blocked(fact, blocks, rows_of_unit(fact.split_size)))
            parts = segments(fact.split_size)
            return in_order(self._rewrite, joined, parts, fact.placement.dim, blocks) if parts else joined
        if edge is not None and edge.bucket:
            if value not in self._sums:
                self._sums.update(self._reduced_bucket(edge.bucket))
            return self._sums[value]
        if edge is not None and edge.compressor != NONE:
            (total,) = reduce_compressed([exchange], [value], f"{source.node.name}/compress")
            return total
        return all_reduce(exchange, source, fact)

    def _reduced_bucket(self, bucket: int) -> Iterable[tuple[Value, Value]]:
        rewrite = self._rewrite
        edges = [edge for edge in rewrite.edges.values() if edge.bucket == bucket]
        members = [(rewrite.graph.value(edge.value), edge) for edge in edges if edge.to != SIZES]
        riding = self._blocks if len(members) < len(edges) else None
        return reduce_bucket(rewrite, members, self._keys, riding)

    def _piece(self, whole: Value, value: Value, wanted: Slice, blocks: Blocks) -> Value:
        """Return this replica's block of a whole value."""
        dim, rows, parts = wanted.dim, wanted.unit, wanted.segments
        is_input = self.asked.is_of_input(value, wanted)
        if blocks.interleaved:
            which = blocks.all_rows("examples" if is_input else "whole_examples", rows)
            return rows_at(self._rewrite, whole, which, dim, "block", EACH)
        if parts:  # never of a batch input
            return piece_with_segments(self._rewrite, whole, parts, dim, blocks)
        part = "part_" if is_input else ""
        limits = blocks.rows(f"{part}begin", rows), blocks.rows(f"{part}end", rows)
        return rows_between(self._rewrite, whole, value.node.name, dim, limits)


def term(rewrite: Rewrite, source: Value, span: Span) -> Value:
    """Return the value in the first instance of all, and zeros in the others: a sum of one term."""
    build = FoldedBuilder.of(rewrite, source, span=span)
    if span == PER_REPLICA:
        mine = build.of_replicas([index == 0 for index in range(rewrite.plan.replicas)], np.bool_, "is_first")
    else:
        first = [index == 0 for index in range(rewrite.replicas)]
        mine = rewrite.const_each(first, np.bool_, name=f"{build.name}/is_first", near=source)
    zeros = build.op("ZerosLike", source, what="zeros")
    return build.op("SelectV2", mine, source, zeros, what="term")


def local_entry(rewrite: Rewrite, value: Value, wanted: LocalEntry, blocks: Blocks) -> Value:
    """Return a shape vector whose entry is this replica's size instead of the whole size."""
    build, fact, rows = FoldedBuilder.of(rewrite, value, span=EACH), rewrite.fact(value), rows_per_example(wanted.size)
    (length,) = (dim if isinstance(dim, int) else 0 for dim in fact.shape or ())
    if rows is None:
        raise PassError(f"the size {wanted.size} of one block is not known", node=value.node)
    at = np.zeros(length, np.int64)
    at[wanted.position] = 1
    mine = blocks.rows("count", rows)
    if fact.dtype != dtypes.INT32:
        mine = build.op("Cast", mine, what="rows", DstT=fact.dtype)
    placed = build.op("Mul", mine, build.const(at, fact.dtype, "entry"), what="placed")
    others = build.op("Mul", value, build.const(1 - at, fact.dtype, "others"), what="kept")
    return build.op("AddV2", placed, others, what="local_size")


# Reduce many small gradients with one collective.
#
#     before   CollectiveReduceV2(%dw1)   CollectiveReduceV2(%dw2)
#     after    CollectiveReduceV2(Concat(flat %dw1, flat %dw2)) ──SplitV──► dw1, dw2
#
# A bucket is filled in the order in which the backward pass produces its members, so that it can be sent while the rest
# is computed. Members must be ready together: none may depend on the reduction of another, and none may be in a loop or
# a branch. A bucket may also contain sizes and digests that processes exchange (`resolve.buckets`).


def reduce_bucket(
    rewrite: Rewrite, members: Sequence[tuple[Value, EdgePlan]], keys: Keys, riding: Blocks | None = None
) -> Iterable[tuple[Value, Value]]:
    """Reduce several partial values with one collective; return each with its sum.

    Args:
        members: partial values with their edges, of one element type.
        keys: of collectives.
        riding: blocks whose sizes and digests are in the bucket, if any.
    """
    values = [value for value, _ in members]
    exchanges = [Exchange(rewrite, keys, edge) for _, edge in members]
    name = f"autograph_bucket_{members[0][1].bucket}"
    if members[0][1].compressor != NONE:
        return zip(values, reduce_compressed(exchanges, values, name), strict=True)
    sent = [
        contribution(one, rewrite.current(value), rewrite.fact(value), one.planned.lowered.hops[:-1])
        for one, value in zip(exchanges, values, strict=True)
    ]
    packing = Packing(rewrite, values, name, [riding.row_length] if riding is not None else [])
    rows = [riding.row_in_halves(sent[0].dtype)] if riding is not None else []
    total = sum_of_members(exchanges[0], packing.join([*sent, *rows]), name)
    parts = packing.split(total, total)
    if riding is not None:
        riding.take_halves(parts.pop())
    sums = [
        cast(rewrite, whole, rewrite.fact(value).dtype, f"{value.node.name}/narrow")
        for value, whole in zip(values, parts, strict=True)
    ]
    return zip(values, sums, strict=True)


# Slice a replicated value into blocks with segments, and gather such blocks in the original's row order.
#
#     whole   a0 a1 a2 b0 b1 b2                  slices: rows 0 to 2 and 3 to 5 | rows 2 to 3 and 5 to 6
#     joined  a0 a1 b0 b1 | a2 b2                rows 0 1 4 2 3 5 of it are the whole
#
# Where a segment of a block begins follows from the lengths of all blocks, so an uneven batch needs nothing else.


def in_order(rewrite: Rewrite, joined: Value, parts: Sequence[int], dim: int, blocks: Blocks) -> Value:
    """Put the rows of joined blocks in the order of the whole.

    Args:
        joined: all blocks, concatenated.
        parts: rows per example of each segment, in order.
        dim: along which they are joined.
        blocks: of the batch.
    """
    where = blocks.ordered(tuple(parts), lambda: _order(rewrite, parts, blocks))
    return rows_at(rewrite, joined, where, dim, "in_order", joined.node.span)


def _order(rewrite: Rewrite, parts: Sequence[int], blocks: Blocks) -> Value:
    """Return the position of each row of the whole in the joined blocks (vector, runs once)."""
    count, name = rewrite.replicas, f"{SCOPE}/segments_{'_'.join(map(str, parts))}"
    before = [0, *accumulate(parts)]
    starts, sizes = np.zeros((len(parts) * count, count), np.int32), np.zeros((len(parts) * count, count), np.int32)
    for i, rows in enumerate(parts):
        for r in range(count):
            starts[i * count + r, :r] = before[-1]
            starts[i * count + r, r] = before[i]
            sizes[i * count + r, r] = rows

    build = FoldedBuilder.of(rewrite, blocks.source, name, span=ONCE)

    def const(content: object, what: str) -> Value:
        made = build.numbers(content, what)
        made.node.set_span(ONCE)
        return made

    def of_lengths(matrix: object, what: str) -> Value:
        products = build.op("Mul", const(matrix, f"{what}_of_block"), blocks.lengths, what=f"{what}_terms")
        return build.op("Sum", products, const([1], f"{what}_axis"), what=what, keep_dims=True)

    first, size = of_lengths(starts, "first"), of_lengths(sizes, "size")
    zero, one = const(0, "zero"), const(1, "one")
    longest = build.op("Max", size, const([0, 1], "axes"), what="longest")
    places = build.op("Range", zero, longest, one, what="places")
    numbers = build.op("AddV2", first, places, what="rows")
    there = build.op("Where", build.op("Less", places, size, what="is_there"), what="there")
    return build.op("GatherNd", numbers, there, what="order", Tindices=dtypes.INT64)


def piece_with_segments(rewrite: Rewrite, whole: Value, parts: Sequence[int], dim: int, blocks: Blocks) -> Value:
    """Cut each replica's block of each segment out of a whole value.

    Args:
        whole: the replicated value.
        parts: rows per example of each segment, in order.
        dim: the dimension that is split.
        blocks: limits of the replicas' blocks.
    """
    name, cut = whole.node.name, []
    for before, rows in zip([0, *accumulate(parts)], parts, strict=False):
        limits = [blocks.rows(what, rows) for what in ("begin", "end")]
        if before:
            limits = [_behind(rewrite, limit, blocks.rows("batch", before)) for limit in limits]
        cut.append(rows_between(rewrite, whole, name, dim, (limits[0], limits[1])))
    build = FoldedBuilder.of(rewrite, whole, span=EACH)
    return build.op("ConcatV2", *cut, build.numbers(dim, "segments_axis"), what="segments", N=len(cut))


def _behind(rewrite: Rewrite, limit: Value, rows: Value) -> Value:
    return FoldedBuilder.of(rewrite, limit, span=EACH).op("AddV2", limit, rows, what="behind")


def _run(rewrite: Rewrite) -> None:
    """Lower the reshards: slice, add or all-reduce, concat or all-gather; sizes become local or global."""
    lowered = LoweredReshards(rewrite, rewrite.get(Reshards), rewrite.get(Blocks), rewrite.get(Keys))
    lowered.lower_all()
    lower_along_model(rewrite)
    if rewrite.plan.pipeline is not None:
        stay_in_stages(rewrite.graph)
    rewrite.put(lowered)


def lower_along_model(rewrite: Rewrite) -> None:
    """Lower the exchanges between devices of a replica that run one program."""
    nodes = tuple(node for node in rewrite.graph if axis_along(node))
    along = AlongModel(rewrite, nodes, rewrite.get(Keys).salt)
    for node in nodes:
        before = len(rewrite.graph)
        new = along.lower(node)
        if rewrite.has(Stages):
            made = islice(reversed(rewrite.graph.nodes.values()), len(rewrite.graph) - before)
            _stay_with(node, [one for one in made if one.span == EACH], rewrite.get(Stages))
        for control in node.controls:
            new.node.add_control(control)
        _replace_reshard(rewrite, node, new)
        take_name(rewrite.graph, new.node, node.name)


def _stay_with(reshard: Node, made: Iterable[Node], stages: Stages) -> None:
    """Put the nodes of a conversion in the stage of its reshard, which determines the keys of its groups.

    Its operand may be computed in an earlier stage, on other devices.
    """
    for node in made:
        node.put(STAGE, reshard.at(STAGE))
        if reshard in stages.backward:
            stages.backward.add(node)


def _replace_reshard(rewrite: Rewrite, node: Node, new: Value) -> None:
    """Let what a reshard was lowered to take its place for readers, waiting ops and the certificate; erase it."""
    old = node.output()
    if old in rewrite.state.facts:  # a pass inserted it before propagation
        rewrite.take_place(old, new)
    elif old in rewrite.originals:
        rewrite.take_place(rewrite.originals[old], new)
    rewrite.replace(old, new)
    for user in node.control_users:
        user.remove_control(node)
        user.add_control(new.node)
    rewrite.graph.erase(node)


LOWER_RESHARDS = Pass("lower-reshards", _run, needs=(Reshards, Blocks, Keys), gives=(LoweredReshards,))
