"""Emit all-gathers: blocks become the whole value, on the first device, on every device, or once in each process.

    shared               ConcatV2(all(%x))
    mirrored             CollectiveGatherV2(%x, keys)
    shared, processes    CollectiveGatherV2(ConcatV2(all(%x)), keys)

The edge's lowering lists the hops; the medium of each chooses the function that emits it (`GATHER`). CollectiveGatherV2
needs the same shape from all members, so unequal blocks are padded to the longest and cut again (`padded_gather`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.mesh import EACH, ONCE, Span
from autograph_rewrite.ir.types import attrs, dtypes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import has_rows_of_each_example, rows_per_example
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.collectives.exchange import Exchange, between_processes
from autograph_rewrite.passes.collectives.local_ops import gather_local, joined, transposed
from autograph_rewrite.passes.collectives.padded_gather import Rows, gather_equal, gather_padded
from autograph_rewrite.passes.collectives.server_stores import gather_at_server
from autograph_rewrite.passes.collectives.wire_values import bytes_of_texts, decode, encode, texts_of_bytes
from autograph_rewrite.plan.parts.lowerings import ACROSS, Hop, Medium, is_among_replicas
from autograph_rewrite.plan.parts.messages import SIZES, STEP, EdgePlan
from autograph_rewrite.resolve.wire_types import REAL_PARTS, may_change_inside

RESTORES = "_autograph_restores"
"""Attribute of the node that puts the rows of joined micro-batches back in their order."""
ANY_GATHER = "concat"
"""The lowering of a value that the plan does not name."""


class Blocked(NamedTuple):
    """How a value is split into blocks.

    Attributes:
        fact: of the value; its placement has the split dimension.
        blocks: of the batch input that it is computed from.
        per_example: rows of each example; None if unknown.
    """

    fact: Fact
    blocks: Blocks
    per_example: int | None

    @property
    def dim(self) -> int:
        """The dimension along which it is split."""
        return self.fact.placement.dim

    @property
    def changing(self) -> bool:
        """Whether the shape of a block may differ between steps."""
        return self.blocks.static is None or may_change_inside(self.fact)


def _by_ops(exchange: Exchange, hop: Hop, value: Value, blocked: Blocked) -> Value:
    """Join the blocks of this process's replicas on its first device."""
    whole = gather_local(exchange.rewrite, value, blocked.fact)
    return _restored(exchange, whole, blocked) if blocked.blocks.interleaved else whole


def _restored(exchange: Exchange, joined: Value, blocked: Blocked) -> Value:
    """Put the rows of joined micro-batches back in the order of their examples.

    Raises:
        PassError: it is unknown which row belongs to which example.
    """
    rewrite, edge, (_, blocks, per_example), dim = exchange.rewrite, exchange.edge, blocked, blocked.dim
    if per_example is not None or has_rows_of_each_example(blocked.fact.split_size):
        where = blocks.restored_rows(joined, dim) if per_example is None else blocks.all_rows("restored", per_example)
        restored = rows_at(rewrite, joined, where, dim, "restored", joined.node.span)
        restored.node.set_raw_attr(RESTORES, attrs.encode("bool", True))
        return restored
    if edge is not None and edge.owner != STEP and _another_is_unordered(rewrite, edge):
        return joined  # the rows of a sparse gradient may have any order that values and indices share
    raise PassError(
        f"the rows of '{joined.node.name}' do not follow from the number of examples, so they have no order to restore",
        node=joined.node,
        hint="set accumulation.layout to contiguous",
    )


def _another_is_unordered(rewrite: Rewrite, edge: EdgePlan) -> bool:
    """Return whether another part of the same sparse gradient, its values or its indices, has rows without an order."""
    others = (one for one in rewrite.edges.values() if one.owner == edge.owner and one.value != edge.value)
    facts = [rewrite.fact(rewrite.graph.value(one.value)) for one in others if one.to == edge.to]
    return any(
        fact.placement.is_split
        and rows_per_example(fact.split_size) is None
        and not has_rows_of_each_example(fact.split_size)
        for fact in facts
    )


def _by_collective(exchange: Exchange, hop: Hop, value: Value, blocked: Blocked) -> Value:
    gather = _among_all if is_among_replicas(hop) else _among_processes
    return gather(exchange, value, blocked)


def _among_all(exchange: Exchange, value: Value, blocked: Blocked) -> Value:
    """Gather the blocks of all replicas on every device."""
    blocks, per_example = blocked.blocks, blocked.per_example
    assert per_example is not None  # plan edges choose this lowering only then
    rows = None
    if not blocks.even:
        rows = Rows(*(blocks.rows(what, per_example) for what in ("count", "lengths", "longest")))
    return gather_padded(exchange, value, blocked.fact.rank or 0, rows, changing=blocked.changing)


def _among_processes(exchange: Exchange, part: Value, blocked: Blocked) -> Value:
    """Gather the parts of all processes; each process has one, which runs once.

    Raises:
        PassError: the rank is not known.
    """
    rewrite, name, rank, dim = exchange.rewrite, part.node.name, blocked.fact.rank, blocked.dim
    if rank is None:
        raise PassError(
            f"'{part.name}' has to be whole in every process, but its rank is not known",
            node=part.node,
            hint="set its shape with tf.ensure_shape, or do not use it across examples",
        )
    order, build = [dim, *(i for i in range(rank) if i != dim)], FoldedBuilder.of(rewrite, part)
    first = transposed(part, order, build, "rows_first", "rows_first_axes") if dim else part
    if part.dtype == dtypes.STRING:
        rows, longest = _rows_and_bytes(exchange, first, blocked)
        coded = bytes_of_texts(FoldedBuilder.of(rewrite, first), first, longest)
        gathered = gather_padded(exchange, coded, rank + 1, rows, changing=True)
        whole = texts_of_bytes(FoldedBuilder.of(rewrite, gathered, name), gathered)
    else:
        coded = encode(rewrite, first, "gather", name)
        changing = blocked.changing or blocked.per_example is None
        rows = _rows_of_parts(exchange, coded, blocked)
        rank += coded.dtype != part.dtype and part.dtype in REAL_PARTS  # a complex number is sent as a row of two
        gathered = gather_padded(exchange, coded, rank, rows, changing=changing)
        whole = decode(rewrite, gathered, part.dtype, name)
    return transposed(whole, np.argsort(order).tolist(), build, "rows_back", "rows_back_axes") if dim else whole


def _rows_of_parts(exchange: Exchange, part: Value, blocked: Blocked) -> Rows:
    """Return the rows of each process: known from the batch, or else counted and exchanged."""
    rewrite, blocks, per_example, name = exchange.rewrite, blocked.blocks, blocked.per_example, part.node.name
    if per_example is not None:
        parts = blocks.rows("parts", per_example)
        axis = rewrite.const(0, np.int32, name=f"{name}/parts_axis", near=blocks.source)
        longest = _longest(rewrite, parts, axis, part)
        return Rows(blocks.rows("part", per_example), parts, longest)
    build = FoldedBuilder.of(rewrite, part, span=ONCE)
    mine = _rows_of(part, build)
    lengths = blocks.of_each_process(mine, rewrite.edges[exchange.planned.value, SIZES], part)
    return Rows(mine, lengths, _longest(rewrite, lengths, build.numbers(0, "lengths_axis"), part))


def _rows_and_bytes(exchange: Exchange, part: Value, blocked: Blocked) -> tuple[Rows, Value]:
    """Return the rows of each process, and the bytes of the longest text of all: counted and exchanged."""
    rewrite = exchange.rewrite
    build = FoldedBuilder.of(rewrite, part, span=ONCE)
    mine, axis, line = _rows_of(part, build), build.numbers(0, "lengths_axis"), build.numbers([-1], "texts_line")
    sizes = build.op("Reshape", build.op("StringLength", part, what="sizes_of_texts"), line, what="sizes_in_line")
    most = build.op("Maximum", build.op("Max", sizes, axis, what="most"), axis, what="bytes_of_longest")
    row = build.op("ExpandDims", build.op("Pack", mine, most, what="measured", N=2), axis, what="measured_row")
    # The key follows from the size: if the batch is measured on this input, too, both exchanges have this one edge.
    edge = replace(rewrite.edges[exchange.planned.value, SIZES], lowering="host_reduce", bucket=0)
    table = blocked.blocks.of_each_process(row, edge, part, is_row=True, changing=True)
    lengths, bytes_ = (
        build.op("GatherV2", table, build.numbers(i, f"column_{i}"), build.numbers(1, "columns"), what=what)
        for i, what in enumerate(("rows_of_each", "bytes_of_each"))
    )
    return Rows(mine, lengths, _longest(rewrite, lengths, axis, part)), _longest(rewrite, bytes_, axis, part)


def _rows_of(part: Value, build: FoldedBuilder) -> Value:
    """Return how many rows a value has."""
    ends = [build.numbers([i], what) for i, what in ((0, "from"), (1, "to"), (1, "by"))]
    return build.op("StridedSlice", build.op("Shape", part, what="extent"), *ends, what="rows", shrink_axis_mask=1)


def _longest(rewrite: Rewrite, lengths: Value, axis: Value, part: Value) -> Value:
    """Return the largest of `lengths`, at least 1: TensorFlow's gather of an empty tensor ends the process."""
    build = FoldedBuilder.of(rewrite, part, span=ONCE)
    longest = build.op("Max", lengths, axis, what="longest")
    return build.op("Maximum", longest, build.numbers(1, "least"), what="padded")


Gatherer = Callable[[Exchange, Hop, Value, Blocked], Value]
GATHER: dict[tuple[Medium, str], Gatherer] = {
    (Medium.OPS, ""): _by_ops,
    (Medium.COLLECTIVE, ""): _by_collective,
    (Medium.QUEUE, ""): gather_at_server,
}
"""By medium and algorithm of a hop, the function that emits it."""


def all_gather(exchange: Exchange, value: Value, blocked: Blocked) -> Value:
    """Return the whole value, on the devices of the last hop of the edge's lowering.

    Args:
        value: blocks, one per instance.

    Raises:
        PassError: the examples of the rows, or the rank of the value, are unknown.
    """
    for hop in exchange.hops(ANY_GATHER):
        if hop.over == ACROSS:
            value = pad_lengths(exchange, value, blocked.fact.rank or 0, blocked.blocks)
        value = GATHER[hop.medium, hop.algorithm](exchange, hop, value, blocked)
    return value


def gather_between_processes(exchange: Exchange, part: Value, blocked: Blocked) -> Value:
    """Return the concatenated parts of all processes.

    Args:
        part: this process's rows; runs once.

    Raises:
        PassError: the rank is not known.
    """
    for hop in between_processes(exchange.planned.lowered.hops):
        part = GATHER[hop.medium, hop.algorithm](exchange, hop, part, blocked)
    return part


def vectors_of_members(exchange: Exchange, vector: Value, name: str) -> Value:
    """Return the concatenated vectors, equally long, of the members of the last hop.

    Args:
        exchange: an edge that is lowered as a gather.
        vector: [n].
        name: prefix of the names of new nodes.
    """
    if exchange.planned.lowered.is_local:
        return joined(exchange.rewrite, vector, 0, name)
    return gather_equal(exchange, vector, vector, changing=False, name=name)


# Pad outputs: parts of processes that differ in length are padded with zeros to the longest, before they are gathered.
#
#     process 0   logits [2, 3, 10] ─┐ lengths    ┌─► Pad ─► [2, 5, 10] ─┐ gathered
#     process 1   logits [6, 5, 10] ─┘ exchanged ─┴──────► [6, 5, 10] ─┴───────► [8, 5, 10]
#
# Nothing is computed on the zeros: these values are only read from outside. As TensorFlow's dynamic padding for TPUs,
# `padding: power_of_two` rounds a length up to a power of two, at least 2, so that few shapes occur.


_BITS = 31
"""Bits of a non-negative int32 length."""


def pad_lengths(exchange: Exchange, part: Value, rank: int, blocks: Blocks) -> Value:
    """Pad this process's part to the longest part, in the dimensions that the edge names.

    Args:
        part: of this process; runs once.
        blocks: exchanges the sizes.
    """
    rewrite, edge = exchange.rewrite, exchange.planned
    if not edge.padded:
        return part
    build = FoldedBuilder.of(rewrite, part, f"{part.node.name}/lengths", span=ONCE)
    shape = build.op("Shape", part, what="shape")
    row = build.op("Reshape", shape, build.numbers([1, rank], "as_row"), what="row")
    table = blocks.of_each_process(row, rewrite.edges[edge.value, SIZES], part, is_row=True)
    longest = build.op("Max", table, build.numbers(0, "processes"), what="longest")
    if rewrite.plan.padding == "power_of_two":
        longest = _next_power_of_two(build, longest)
    missing = build.op("Sub", longest, shape, what="missing")
    chosen = np.zeros((rank, 1), np.int32)
    chosen[list(edge.padded)] = 1
    column = build.op("Reshape", missing, build.numbers([rank, 1], "as_column"), what="column")
    behind = build.op("Mul", column, build.numbers(chosen * [[0, 1]], "behind"), what="paddings")
    return build.op("Pad", part, behind, what="padded")


def _next_power_of_two(build: FoldedBuilder, lengths: Value) -> Value:
    """Return for each length the next power of two, at least 2: 2, doubled for each power from 2 on that is smaller."""
    powers = build.numbers([[2**bit] for bit in range(1, _BITS)], "powers")
    smaller = build.op("Cast", build.op("Less", powers, lengths, what="smaller"), what="each", DstT=dtypes.INT32)
    doublings = build.op("Sum", smaller, build.numbers(0, "powers_axis"), what="doublings")
    return build.op("LeftShift", build.numbers(2, "two"), doublings, what="rounded")


# Take rows of a value: those that a vector lists, or those between two limits.


def rows_at(rewrite: Rewrite, value: Value, which: Value, dim: int, what: str, span: Span) -> Value:
    """Return the rows of a value whose numbers a vector lists, along dimension `dim`.

    Args:
        which: [n] numbers of rows, computed outside of loops.
        what: the name of the new node, after the value's.
        span: how often it runs.
    """
    build = FoldedBuilder.of(rewrite, value, span=span)
    axis = build.numbers(dim, f"{what}_axis")
    return build.op("GatherV2", value, which, axis, what=what)


def rows_between(rewrite: Rewrite, source: Value, name: str, dim: int, limits: tuple[Value, Value]) -> Value:
    """Return the rows of a value between two limits of each block, along dimension `dim`.

    Args:
        name: prefix of the names of new nodes.
        limits: scalars: the first row, and the one after the last.
    """
    build = FoldedBuilder.of(rewrite, source, name, span=EACH)

    def vector(scalar: Value, what: str) -> Value:
        position = np.zeros(dim + 1, np.int32)
        position[dim] = 1
        at = build.numbers(position, f"{what}_at")
        return build.op("Mul", scalar, at, what=what)

    begin, end = vector(limits[0], "begin"), vector(limits[1], "end")
    step, before = build.numbers(np.ones(dim + 1, np.int32), "step"), (1 << dim) - 1
    return build.op("StridedSlice", source, begin, end, step, what="block", begin_mask=before, end_mask=before)
