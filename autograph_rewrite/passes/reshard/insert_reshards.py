"""Insert a reshard on every edge whose producer and consumer disagree on the placement.

    before   %dw: partial(sum) ──► ResourceApplyAdam
    after    %dw ──► AddN(all) ──► ResourceApplyAdam             (shared)
             %dw ──► CollectiveReduceV2 ──► ResourceApplyAdam    (mirrored)

Each value is converted once, whoever reads it. Relies on `assign_spans` having marked what each replica runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from autograph_rewrite.analysis.batch_groups import batch_groups
from autograph_rewrite.analysis.empty_lists import future_splits
from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import awaited, frames_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE, STAGE, Select, Span, is_rarer
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ops.facts.placement import LOCAL, PARTIAL, REPLICATED, Fact, Placement, split
from autograph_rewrite.ops.facts.symbolic_dims import rows_per_example, segments
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, MERGES, SWITCHES, has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.claims import claims_of
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.report import Resolved
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.collectives.all_gather import Blocked, all_gather, gather_between_processes
from autograph_rewrite.passes.collectives.all_reduce import (
    all_reduce,
    contribution,
    reduce_between_processes,
    sum_of_members,
)
from autograph_rewrite.passes.collectives.block_bounds import SCOPE, Blocks
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.passes.collectives.packing import Packing
from autograph_rewrite.passes.collectives.rows import rows_at, rows_between
from autograph_rewrite.passes.collectives.wire_values import cast, refuse_container
from autograph_rewrite.passes.compression.compress import reduce_compressed
from autograph_rewrite.passes.parameter_server.put_at_homes import put_at_homes
from autograph_rewrite.passes.reshard.global_sizes import global_size, read_early
from autograph_rewrite.passes.variable_sharding.regather import gather_for_each
from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.resolve.batch.batch_inputs import inputs_behind, measured_input
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.resolve.stages.assignment import Stages, assign_stages


def assign_spans(rewrite: Rewrite) -> None:
    """Mark each node with how often it runs: once, on every replica, or for every micro-batch of each."""
    rewrite.future_splits = future_splits(rewrite.state)
    order = rewrite.state.order
    handles = rewrite.handles
    for node in order:
        node.set_span(_span(rewrite, node, handles))
    devices = run_devices(rewrite.plan, rewrite.task)
    if len(set(devices)) > 1 or parse(devices[0]).kind != "CPU":
        _enter_where_it_is_carried(order)
    if rewrite.plan.gathers_for_each:
        gather_for_each(order)
    for node in (*order, *reversed(order)):
        if node.op == "NoOp" and _stands_between_instances(node):
            node.set_span(EACH)


def _stands_between_instances(node: Node) -> bool:
    """Return whether a NoOp lets nodes that every replica runs wait for some: once, it would make the replicas wait."""
    users, each = node.control_users, EACH
    return bool(users) and all(n.span == each for n in users) and any(n.span == each for n in node.controls)


def _enter_where_it_is_carried(order: Iterable[Node]) -> None:
    """Let values enter a loop on each device that carries them on: another would send them in the first iteration."""
    for node in order:
        enters = node.op in ENTERS and not node.attr("is_constant", False)
        if enters and any(user.span == EACH and user.op in MERGES for user, _ in node.output().uses):
            node.set_span(EACH)


def _span(rewrite: Rewrite, node: Node, handles: frozenset[str]) -> Span:
    state = rewrite.state
    if node.is_driven:
        return ONCE
    if node.op == "LoopCond":
        return ONCE  # one condition for all replicas
    if differs_by_replica(state, node, rewrite.future_splits):
        return EACH
    if not rewrite.mirrored or is_pinned(node) or node.place:
        return ONCE
    is_input = has(node.op, "fed") and node.name not in handles
    return ONCE if is_input else rewrite.common_span


def _carries(carrier: Node, merge: Node) -> bool:
    """Return whether a node brings a loop variable to its Merge, and nothing else."""
    if carrier.op in BACK_EDGES:
        return True
    enters = carrier.op in ENTERS and not carrier.attr("is_constant")
    return enters and merge.span != EACH and all(reader is merge for reader, _ in carrier.output().uses)


class ReshardInserter:
    """Converts values on demand and remembers what it made.

    Args:
        blocks: limits of the replicas' blocks.
        keys: makes the keys of collectives.
    """

    def __init__(self, rewrite: Rewrite, blocks: Blocks, keys: Keys) -> None:
        self._rewrite = rewrite
        self._blocks = blocks
        self._blocks_of: dict[Value, Blocks] = {blocks.source: blocks}
        self._keys = keys
        self._whole: dict[Value, Value] = {}
        self._pieces: dict[tuple[Value, Slice, Value], Value] = {}
        self._terms: dict[Value, Value] = {}
        self._predicates: dict[Value, Value] = {}
        self._carried: dict[Node, Reshard | None] = {}  # what brings values to the Merge of a loop
        self._brought: dict[Value, Value] = {}  # by what is converted for it, the value that has the plan's edge
        state = rewrite.state
        self._entered = {node: node.inputs[0] for node in state.order if node.op in ENTERS}
        matters = rewrite.processes == 1 and blocks.static is None and len(state.whole_inputs) > 1
        self._behind = inputs_behind(state) if matters else {}
        self.groups = batch_groups(state) if matters else None

    def run(self) -> None:
        """Convert every edge of the original graph."""
        self._share_draws()
        self._before_back_edges()
        for node in self._rewrite.state.order:
            transferred = self._rewrite.state.transfers[node]
            if transferred.constant:
                constant_size(self._rewrite, node, self._read)
                continue
            self._connect(node)
            if (early := read_early(self._rewrite, node)) is not None:
                self._read_instead(node.output(), early)

    def _read_instead(self, value: Value, new: Value) -> None:
        """Let those that read a value as it is read another one."""
        for user, position in value.uses:
            transferred = self._rewrite.state.transfers.get(user)
            if transferred is None or position not in transferred.operand_reshards:
                self._read(user, position, new)

    def _share_draws(self) -> None:
        """Let all processes use what the first one drew: others draw zeros, and all is added up."""
        rewrite = self._rewrite
        for edge in [edge for edge in rewrite.edges.values() if edge.from_ == "single"]:
            value = rewrite.graph.value(edge.value)
            drawn = rewrite.of_worker_0(value)
            shared = reduce_between_processes(Exchange(rewrite, self._keys, edge), drawn, "sum", changing=True)
            value.replace_all_uses_with(shared, keep=set(ancestors([shared.node])))
            rewrite.take_place(value, shared)

    def _before_back_edges(self) -> None:
        """Let what brings a loop variable to its Merge carry the converted value, and run where the Merge does.

        Nothing may stand between NextIteration and its Merge; and what only enters a loop is there in the first
        iteration only, while TensorFlow would wait in each for what comes from another device.
        """
        state = self._rewrite.state
        for node in state.order:
            if node.op not in MERGES:
                continue
            for index, value in enumerate(node.inputs):
                reshard = state.transfers[node].operand_reshards.get(
                    index, REPLICATED if value in state.reduced else None
                )
                if _carries(value.node, node) and (reshard is not None or node.span != EACH):
                    self._carry(value, node, reshard)

    def _carry(self, value: Value, merge: Node, reshard: Reshard | None) -> None:
        carrier = value.node
        self._brought[carrier.inputs[0]] = value
        self._carried[carrier] = reshard
        carrier.set_span(merge.span)
        if (home := self._rewrite.home_of(merge)) is not None:
            self._rewrite.settle(carrier, home)

    def _connect(self, node: Node) -> None:
        state = self._rewrite.state
        operand_reshards = state.transfers[node].operand_reshards
        if (carried := self._carried.get(node)) is not None:
            operand_reshards = {0: carried}
        for index, value in enumerate(node.inputs):
            reshard = operand_reshards.get(index)
            if value.node in self._carried:
                reshard = None
            elif reshard is None and value in state.whole_inputs:
                reshard = Slice(state.whole_inputs[value], 1)
            elif reshard is None and value in state.reduced:
                reshard = REPLICATED
            new = value if reshard is None else self.convert(value, reshard, node)
            if index == 1 and node.op in SWITCHES:
                new = self._common_predicate(new)
            self._read(node, index, new)

    def _common_predicate(self, value: Value) -> Value:
        """Return one predicate for all replicas."""
        if value.node.span == ONCE:
            return value
        if value not in self._predicates:
            self._predicates[value] = common_predicate(self._rewrite, value)
        return self._predicates[value]

    def _read(self, node: Node, index: int, value: Value) -> None:
        crosses = is_rarer(node.span, value.node.span)
        if not crosses and node._inputs[index] is value and not node.selects:
            return
        mirrored = crosses and self._rewrite.mirrored and node.span == ONCE
        if mirrored:
            value = self._rewrite.of_replica(value)
        node.set_input(index, value, Select.FIRST if crosses else None)
        if mirrored:
            node.add_control(value.node)  # fetching replica 0's value alone would leave its collectives waiting

    def convert(self, value: Value, reshard: Reshard, reader: Node) -> Value:
        """Return `value` as `reader` wants it.

        Args:
            value: as it was before any conversion.
            reshard: the placement that is wanted, or the block.
            reader: for messages, and for the loop that it is in.
        """
        made, placement = self._converted(value, reshard, reader)
        if made not in self._rewrite.state.facts:
            self._rewrite.converted[made] = placement
        return made

    def _converted(self, value: Value, reshard: Reshard, reader: Node) -> tuple[Value, Placement]:
        if isinstance(reshard, LocalEntry):
            return self._local_entry(value, reshard, reader), LOCAL
        if isinstance(reshard, Slice):
            return self.piece(value, reshard, reader), split(reshard[0])
        if reshard == PARTIAL:
            return self._term(self.whole(value, reader)), PARTIAL
        if reshard == REPLICATED:
            return self.whole(value, reader), REPLICATED
        raise PassError(f"no conversion of '{value.name}' to {reshard}", node=reader)

    def whole(self, value: Value, reader: Node) -> Value:
        """Return the whole, global value."""
        if value not in self._whole:
            self._whole[value] = self._make_whole(value, reader)
        return self._whole[value]

    def _make_whole(self, value: Value, reader: Node) -> Value:
        rewrite = self._rewrite
        fact = rewrite.fact(value)
        if value in rewrite.state.whole_inputs:
            return self._whole_input(value, fact)
        if not fact.placement.differs:
            return value
        refuse_container(value, fact, reader)
        if value.node in self._entered:
            return self._enter(value.node, self.whole(self._entered[value.node], reader))
        if fact.is_local:
            batch = self.blocks_at(value.node).batch
            return global_size(rewrite, value, fact, batch, self._keys)
        edge = rewrite.edges.get((value.name, "replicated"))
        if edge is None and value in self._brought:
            edge = rewrite.edges.get((self._brought[value].name, "replicated"))
        with rewrite.at(self._home(edge)):
            return self._combined(value, fact, edge)

    def _enter(self, enter: Node, value: Value) -> Value:
        """Return a value in the loop that `enter` leads into: exchanged before it, not by a collective in it."""
        rewrite, name = self._rewrite, f"{enter.name}/whole"
        attrs = {key: enter.attr(key) for key in ("frame_name", "is_constant", "parallel_iterations")}
        # A Merge on another device would wait for the value in every iteration, so each has an Enter of its own.
        span = EACH if value.node.span == EACH else rewrite.common_span
        node = rewrite.add("Enter", [value], Site(name, span, enter), attrs=attrs, controls=enter.controls)
        rewrite.frames[node] = rewrite.frames[enter]
        return node.output()

    def _home(self, edge: EdgePlan | None) -> str | None:
        """Return where what the replicas of the only process hold is combined, if its owner lives somewhere."""
        is_alone = edge is not None and self._rewrite.processes == 1
        return self._rewrite.homes.of.get(edge.owner) if is_alone and edge is not None else None

    def _combined(self, value: Value, fact: Fact, edge: EdgePlan | None) -> Value:
        rewrite = self._rewrite
        exchange = Exchange(rewrite, self._keys, edge)
        original, value = value, rewrite.current(value)
        if fact.placement.is_partial:
            if edge is not None and edge.bucket:
                return self._from_bucket(original, edge.bucket)
            if edge is not None and edge.compressor != "none":
                (total,) = reduce_compressed([exchange], [original], f"{value.node.name}/compress")
                return total
            return all_reduce(exchange, value, fact)
        rows, blocks = rows_per_example(fact.split_size), self.blocks_at(original.node)
        joined = all_gather(exchange, value, Blocked(fact, blocks, rows))
        parts = segments(fact.split_size)
        return in_order(rewrite, joined, parts, fact.placement.dim, blocks) if parts else joined

    def _whole_input(self, value: Value, fact: Fact) -> Value:
        """Return a whole batch input, of which several processes hold a part each."""
        rewrite = self._rewrite
        if rewrite.processes == 1:
            return value
        edge = rewrite.edges[value.name, "replicated"]
        part = fact._replace(placement=split(rewrite.state.whole_inputs[value]))
        return gather_between_processes(Exchange(rewrite, self._keys, edge), value, Blocked(part, self._blocks, 1))

    def _from_bucket(self, value: Value, bucket: int) -> Value:
        """Reduce a whole bucket, and return the sum of one of its members."""
        rewrite = self._rewrite
        edges = [edge for edge in rewrite.edges.values() if edge.bucket == bucket]
        members = [(rewrite.graph.value(edge.value), edge) for edge in edges if edge.to != SIZES]
        riding = self._blocks if len(members) < len(edges) else None
        self._whole.update(reduce_bucket(rewrite, members, self._keys, riding))
        return self._whole[value]

    def piece(self, value: Value, reshard: Slice, reader: Node) -> Value:
        """Return this replica's block of the whole value.

        Args:
            value: replicated, or a batch input.
            reshard: dimension, rows per example and segments.
            reader: for messages, and for the loop that it is in.
        """
        dim, rows, parts = reshard.dim, reshard.unit, reshard.segments
        is_input = self._rewrite.state.whole_inputs.get(value) == dim and not parts
        blocks = self._measured_on(value) if is_input else self.blocks_at(reader)
        key = (value, reshard, blocks.source)
        if key not in self._pieces:
            fact = self._rewrite.fact(value)
            refuse_container(value, fact, reader)
            whole, part = (value, "part_") if is_input else (self.whole(value, reader), "")
            if blocks.interleaved:
                which = blocks.all_rows("examples" if is_input else "whole_examples", rows)
                self._pieces[key] = rows_at(self._rewrite, whole, which, dim, "block", EACH)
            elif parts:
                self._pieces[key] = piece_with_segments(self._rewrite, whole, parts, dim, blocks)
            else:
                limits = blocks.rows(f"{part}begin", rows), blocks.rows(f"{part}end", rows)
                self._pieces[key] = rows_between(self._rewrite, whole, value.node.name, dim, limits)
            self._rewrite.slices[self._pieces[key]] = whole
        return self._pieces[key]

    def blocks_at(self, node: Node) -> Blocks:
        """Return the blocks by which a node goes: those of a batch input that it depends on, and whose size it has."""
        behind = self._behind.get(node, ())
        alike = self.groups.of(node) if self.groups is not None else ()
        if alike:
            behind = tuple(value for value in behind if value in alike) or alike
        return self._blocks if not behind or self._blocks.source in behind else self._measured_on(behind[0])

    def _measured_on(self, value: Value) -> Blocks:
        """Return the blocks to cut `value` by: a batch input is measured itself, so that it can be fed alone."""
        axis = self._rewrite.state.whole_inputs.get(value)
        if axis is None:
            return self._blocks
        if value not in self._blocks_of:
            self._blocks_of[value] = Blocks(self._rewrite, value, axis, self._keys)
        return self._blocks_of[value]

    def _term(self, source: Value) -> Value:
        """Return the value on replica 0 and zeros elsewhere: a sum of one term."""
        if source not in self._terms:
            rewrite, build = self._rewrite, FoldedBuilder.of(self._rewrite, source, span=EACH)
            first = [index == 0 for index in range(rewrite.replicas)]
            mine = rewrite.const_each(first, np.bool_, name=f"{build.name}/is_first", near=source)
            zeros = build.op("ZerosLike", source, what="zeros")
            self._terms[source] = build.op("SelectV2", mine, source, zeros, what="term")
        return self._terms[source]

    def _local_entry(self, value: Value, reshard: LocalEntry, reader: Node) -> Value:
        """Return a shape vector whose entry is this replica's size instead of the whole size."""
        build, fact, rows = (
            FoldedBuilder.of(self._rewrite, value, span=EACH),
            self._rewrite.fact(value),
            rows_per_example(reshard.size),
        )
        (length,) = (dim if isinstance(dim, int) else 0 for dim in fact.shape or ())
        if rows is None:
            raise PassError(f"the size {reshard.size} of one block is not known", node=value.node)
        at = np.zeros(length, np.int64)
        at[reshard.position] = 1
        mine = self.blocks_at(reader).rows("count", rows)
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
# A bucket is filled in the order in which the backward pass produces its members, so that it can leave while the rest
# is still being computed. Members must be ready together: none may depend on the reduction of another, and none may be
# in a loop or a branch. What the processes tell each other of sizes and digests may ride along (`resolve.buckets`).


def reduce_bucket(
    rewrite: Rewrite, members: Sequence[tuple[Value, EdgePlan]], keys: Keys, riding: Blocks | None = None
) -> Iterable[tuple[Value, Value]]:
    """Reduce several partial values with one collective; return each with its sum.

    Args:
        members: partial values with their edges, of one element type.
        keys: makes the collective's keys.
        riding: blocks whose sizes and digests ride along; None: they do not.
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
    parts = packing.split(total, sent[0])
    if riding is not None:
        riding.take_halves(parts.pop())
    sums = [
        cast(rewrite, whole, rewrite.fact(value).dtype, f"{value.node.name}/narrow")
        for value, whole in zip(values, parts, strict=True)
    ]
    return zip(values, sums, strict=True)


# Replace a size that propagation has found to be a plain number by a constant.
#
# ShapeN(whole, block) ──► ConcatOffset ──► Slice         Const ──► Slice


def constant_size(rewrite: Rewrite, node: Node, read: Callable[[Node, int, Value], None]) -> None:
    """Let constants take the place of what a node computes.

    Args:
        node: its outputs are numbers.
        read: lets an input of a node read another value.
    """
    for index, fact in enumerate(rewrite.state.transfers[node].outputs):
        value = node.output(index)
        if not value.uses:
            continue
        dtype = dtypes.numpy_dtype(fact.dtype)
        shape = [dim for dim in fact.shape or () if isinstance(dim, int)]
        content = np.array(fact.value, dtype=dtype).reshape(shape)
        new = rewrite.const(content, dtype, name=f"{node.name}/folded", near=value)
        new.node.set_span(rewrite.common_span)
        _wait_for_operands(rewrite, new.node, node)
        for user, position in value.uses:
            read(user, position, new)
        rewrite.graph.move_anchors(value, new)


def _wait_for_operands(rewrite: Rewrite, constant: Node, folded: Node) -> None:
    """Let a constant in a loop wait for what the node that it stands for has read, not for the node: it must not run.

    Its kernel may compare sizes of blocks with sizes of the whole batch, as that of ConcatOffset does.
    """
    if folded not in constant.controls:
        return

    def taken(value: Value) -> Node:
        return rewrite.add("Identity", [value], Site(f"{folded.name}/taken", value.node.span, folded))

    inside = [value for value in folded.inputs if rewrite.frames.get(value.node) == rewrite.frames.get(folded)]
    operands = [awaited(value, taken) for value in inside]
    if not operands:
        return
    constant.remove_control(folded)
    for node in (*operands, *folded.controls):
        constant.add_control(node)


# Slice a replicated value into blocks with segments, and gather such blocks in the original's row order.
#
#     whole   a0 a1 a2 b0 b1 b2                  slices: rows 0 to 2 and 3 to 5 | rows 2 to 3 and 5 to 6
#     joined  a0 a1 b0 b1 | a2 b2                rows 0 1 4 2 3 5 of it are the whole
#
# Where a segment of a block begins follows from the lengths of all blocks, so an uneven batch needs nothing else.


def in_order(rewrite: Rewrite, joined: Value, parts: Sequence[int], dim: int, blocks: Blocks) -> Value:
    """Put the rows of joined blocks in the order of the whole.

    Args:
        joined: all blocks, one behind the other.
        parts: how many rows of each segment one example has.
        dim: along which they are joined.
        blocks: of the batch.
    """
    where = blocks.ordered(tuple(parts), lambda: _order(rewrite, parts, blocks))
    return rows_at(rewrite, joined, where, dim, "in_order", joined.node.span)


def _order(rewrite: Rewrite, parts: Sequence[int], blocks: Blocks) -> Value:
    """Return where each row of the whole stands among the joined blocks (vector, runs once)."""
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
    """Cut each replica's block of each part out of a whole value.

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


# Share one predicate between all replicas: a rounding difference would send them down different branches.
#
#     before   %p each ──► Switch each
#     after    %p each ──► Identity (replica 0's) once ──► Identity each ──► Switch each
#
# Whether a variable has a value is asked of each replica's own copy, so there all have to say yes: in the branch taken,
# each replica reads its copy.


def common_predicate(rewrite: Rewrite, value: Value) -> Value:
    """Return the predicate that every replica uses instead of its own.

    Each still waits for what its own waits for: the branches may write what is written before.
    """
    name = f"{value.node.name}/predicate"
    once = _of_all(rewrite, value, name) if _asks_for_a_value(value) else _of_first(rewrite, value, name)
    each = rewrite.add("Identity", [once], Site(f"{name}/each", value.node.span, value.node))
    each.add_control(value.node)
    return each.output()


def _of_first(rewrite: Rewrite, value: Value, name: str) -> Value:
    return rewrite.add("Identity", [value], Site(name, ONCE, value.node)).output()


def _of_all(rewrite: Rewrite, value: Value, name: str) -> Value:
    flags = FoldedBuilder.of(rewrite, value, name).gather("Pack", value, what="all", axis=0)
    attrs = {"dtype": dtypes.INT32, "value": np.int32(0)}
    axis = rewrite.add("Const", [], Site(f"{name}/axis", ONCE, value.node), attrs=attrs)
    axis.add_control(flags.node)  # in the loop of the flags
    return rewrite.add("All", [flags, axis.output()], Site(name, ONCE, value.node)).output()


def _asks_for_a_value(value: Value) -> bool:
    """Return whether a condition says that a variable has a value."""
    while value.node.op == "Identity":
        value = value.node.inputs[0]
    return value.node.op == "VarIsInitializedOp"


def _assign_spans(rewrite: Rewrite) -> None:
    """Decide how often each node runs, and what runs where a variable lives."""
    state, plan = rewrite.state, rewrite.plan
    if rewrite.request.certificate is not None:
        rewrite.request.certificate.claimed(rewrite.graph, claims_of(state, rewrite.outputs, plan))
    rewrite.frames = frames_of(state.order)
    put_at_homes(rewrite)
    assign_spans(rewrite)


def _assign_stages(rewrite: Rewrite) -> None:
    """Assign each node to the stage of the pipeline that runs it."""
    found = assign_stages(rewrite.plan, rewrite.get(Propagation), rewrite.outputs, rewrite.item.variables)
    if found is not None:
        stage_of, stages = found
        for node, stage in stage_of.items():
            node.put(STAGE, stage)
        rewrite.put(stages)


def _measure_blocks(rewrite: Rewrite) -> None:
    """Measure the batch: where the block of each replica begins and ends."""
    state = rewrite.get(Propagation)
    source, keys = measured_input(state), Keys(rewrite)
    rewrite.put(keys)
    rewrite.put(Blocks(rewrite, source, state.whole_inputs[source], keys))


def _insert(rewrite: Rewrite) -> None:
    """Insert the reshards: slice, add or all-reduce, concat or all-gather; sizes become local or global."""
    reshard = ReshardInserter(rewrite, rewrite.get(Blocks), rewrite.get(Keys))
    reshard.run()
    rewrite.put(reshard)


ASSIGN_SPANS = Pass("assign-spans", _assign_spans, needs=(Propagation, Resolved), gives=(Homes,), is_whole=False)
ASSIGN_STAGES = Pass(
    "assign-stages", _assign_stages, lambda rewrite: rewrite.plan.pipeline is not None, (Propagation,), (Stages,), False
)
MEASURE_BLOCKS = Pass("measure-blocks", _measure_blocks, needs=(Homes,), gives=(Keys, Blocks), is_whole=False)
INSERT_RESHARDS = Pass("insert-reshards", _insert, needs=(Homes, Blocks, Keys), gives=(ReshardInserter,))
