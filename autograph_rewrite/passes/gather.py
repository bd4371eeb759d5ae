"""Gathering blocks: the whole value, on the first device, on every device, or on the first device of each process.

    shared               ConcatV2(all(%x))
    mirrored             CollectiveGatherV2(%x, keys)
    shared, processes    CollectiveGatherV2(ConcatV2(all(%x)), keys)

CollectiveGatherV2 needs the same shape from all members, so unequal blocks are padded to the longest and cut again:

    [a a]  [b]   ──►  [a a | b .]  ──►  [a a b]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.dims import has_rows_of_each_example, rows_per_example
from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir import attrs, dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.combine import REAL_PARTS, decode, encode, flat, may_change_inside, rows_at
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.keys import Keys, collective_attrs
from autograph_rewrite.passes.stores import gather_at_server
from autograph_rewrite.plan.devices import parse
from autograph_rewrite.plan.lowerings import CROSSING, PUSHED
from autograph_rewrite.plan.parts import SIZES, STEP, EdgePlan

GATHER_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64))
RESTORES = "_autograph_restores"
"""Attribute of what puts the rows of joined micro-batches back in their order."""


class _Rows(NamedTuple):
    """How many rows the members of a gather hold: this one, each, and the longest (int32)."""

    mine: Value
    lengths: Value
    longest: Value


def can_gather_collectively(fact: Fact, per_example: int | None, devices: Sequence[str]) -> bool:
    """Return whether CollectiveGatherV2 can carry the value; it puts its members in the order of the devices."""
    parsed = [parse(device) for device in devices]
    ordered = [(d.job or "", d.task, d.kind, d.index) for d in parsed]
    if ordered != sorted(ordered):
        return False
    return fact.dtype in GATHER_TYPES and fact.placement.dim == 0 and per_example is not None and fact.rank is not None


def gather_once(
    context: Context,
    value: Value,
    fact: Fact,
    edge: EdgePlan | None,
    keys: Keys,
    blocks: Blocks,
    per_example: int | None,
) -> Value:
    """Join the blocks on the first device of each process, and then those of the processes."""
    whole = join_local(context, value, fact)
    if blocks.interleaved:
        whole = _restored(context, whole, fact, edge, blocks, per_example)
    if edge is None or edge.lowering not in CROSSING:
        return whole
    return gather_parts(context, whole, fact, edge, keys, blocks, per_example)


def join_local(context: Context, value: Value, fact: Fact) -> Value:
    """Join the blocks of this process's replicas on its first device."""
    if context.local == 1:
        return context.once(value)
    dim, rank, name = fact.placement.dim, fact.rank, value.node.name
    if not dim or rank is None or not context.plan.looped:
        return _joined(context, value, dim, name)
    others = [axis for axis in range(rank) if axis != dim]  # a loop joins what it makes along the first dimension only
    ahead = _transposed(context, value, [dim, *others], f"{name}/ahead", value.node)
    joined, back = _joined(context, ahead, 0, name), np.argsort([dim, *others]).tolist()
    return _transposed(context, joined, back, f"{name}/back", value.node)


def _joined(context: Context, value: Value, dim: int, name: str) -> Value:
    axis = context.const(dim, np.int32, name=f"{name}/axis", near=value)
    return context.add(
        "ConcatV2",
        [value, axis],
        name=f"{name}/concat",
        span=Span.ONCE,
        origin=value.node,
        gather=(0,),
        attrs={"N": context.local},
    ).output()


def _transposed(context: Context, value: Value, order: Sequence[int], name: str, origin: Node) -> Value:
    """Return a value, made for an original node, with its dimensions in another order."""
    dims = context.const(list(order), np.int32, name=f"{name}_order", near=value)
    return context.add("Transpose", [value, dims], name=name, span=value.node.span, origin=origin).output()


def _restored(
    context: Context, joined: Value, fact: Fact, edge: EdgePlan | None, blocks: Blocks, per_example: int | None
) -> Value:
    """Put the rows of joined micro-batches back in the order of their examples.

    Raises:
        PassError: nobody knows which row belongs to which example.
    """
    dim = fact.placement.dim
    if per_example is not None or has_rows_of_each_example(fact.split_size):
        where = blocks.restored_rows(joined, dim) if per_example is None else blocks.all_rows("restored", per_example)
        restored = rows_at(context, joined, where, dim, "restored", Span.ONCE)
        restored.node.set_raw_attr(RESTORES, attrs.encode("bool", True))
        return restored
    if edge is not None and edge.owner != STEP and _another_is_unordered(context, edge):
        return joined  # the rows of a sparse gradient may come in any order, which is one for values and indices
    raise PassError(
        f"the rows of '{joined.node.name}' do not follow from the number of examples, so they have no order to restore",
        node=joined.node,
        hint="set accumulation.layout to contiguous",
    )


def _another_is_unordered(context: Context, edge: EdgePlan) -> bool:
    """Return whether something else of the same sparse gradient has rows without an order: values for its indices."""
    others = (one for one in context.edges.values() if one.owner == edge.owner and one.value != edge.value)
    facts = [context.fact(context.graph.value(one.value)) for one in others if one.to == edge.to]
    return any(
        fact.placement.is_split
        and rows_per_example(fact.split_size) is None
        and not has_rows_of_each_example(fact.split_size)
        for fact in facts
    )


def gather_parts(
    context: Context, part: Value, fact: Fact, edge: EdgePlan, keys: Keys, blocks: Blocks, per_example: int | None
) -> Value:
    """Gather the parts of all processes, of which each holds one (a value that is made once).

    Raises:
        PassError: the rank is not known.
    """
    name, rank, dim = part.node.name, fact.rank, fact.placement.dim
    if edge.lowering in PUSHED:
        return gather_at_server(context, part, dim, edge)
    if rank is None:
        raise PassError(
            f"'{part.name}' has to be whole in every process, but its rank is not known",
            node=part.node,
            hint="set its shape with tf.ensure_shape, or do not use it across examples",
        )
    order = np.array([dim, *(i for i in range(rank) if i != dim)], np.int32)

    def turned(value: Value, permutation: np.ndarray[tuple[int], np.dtype[np.int32]], what: str) -> Value:
        if not dim:
            return value
        operand = context.const(permutation, np.int32, name=f"{name}/{what}_axes", near=value)
        return context.add(
            "Transpose", [value, operand], name=f"{name}/{what}", span=Span.ONCE, origin=part.node
        ).output()

    first = turned(part, order, "rows_first")
    coded = encode(context, first, "gather", name)
    changing = blocks.static is None or may_change_inside(fact) or per_example is None
    rows = _rows_of_parts(context, coded, edge, blocks, per_example)
    rank += coded.dtype != part.dtype and part.dtype in REAL_PARTS  # a number has become a row of two
    gathered = _gather(context, coded, rank, rows, edge, keys, members=context.processes, changing=changing)
    return turned(decode(context, gathered, part.dtype, name), np.argsort(order).astype(np.int32), "rows_back")


def _rows_of_parts(context: Context, part: Value, edge: EdgePlan, blocks: Blocks, per_example: int | None) -> _Rows:
    """Return the rows of each process: known from the batch, or else counted and exchanged."""
    name = part.node.name
    if per_example is not None:
        parts = blocks.rows("parts", per_example)
        axis = context.const(0, np.int32, name=f"{name}/parts_axis", near=blocks.source)
        longest = _longest(context, parts, axis, part)
        return _Rows(*(context.bring(v, part) for v in (blocks.rows("part", per_example), parts, longest)))
    shape = context.add("Shape", [part], name=f"{name}/extent", span=Span.ONCE, origin=part.node).output()
    ends = [context.const([i], np.int32, name=f"{name}/{w}", near=part) for i, w in ((0, "from"), (1, "to"), (1, "by"))]
    mine = context.add(
        "StridedSlice",
        [shape, *ends],
        name=f"{name}/rows",
        span=Span.ONCE,
        origin=part.node,
        attrs={"shrink_axis_mask": 1},
    ).output()
    lengths = blocks.of_each_process(mine, context.edges[edge.value, SIZES], part)
    axis = context.const(0, np.int32, name=f"{name}/lengths_axis", near=part)
    return _Rows(mine, lengths, _longest(context, lengths, axis, part))


def _longest(context: Context, lengths: Value, axis: Value, part: Value) -> Value:
    """Return how many rows are sent of each part: TensorFlow's gather of nothing at all ends the process."""
    name = part.node.name
    longest = context.add("Max", [lengths, axis], name=f"{name}/longest", span=Span.ONCE, origin=part.node).output()
    one = context.const(1, np.int32, name=f"{name}/least", near=part)
    return context.add("Maximum", [longest, one], name=f"{name}/padded", span=Span.ONCE, origin=part.node).output()


def gather_collective(
    context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys, blocks: Blocks, per_example: int
) -> Value:
    """Gather the blocks of all replicas on every device."""
    rows = None
    if not blocks.even:
        numbers = (blocks.rows(what, per_example) for what in ("count", "lengths", "longest"))
        rows = _Rows(*(context.bring(number, value) for number in numbers))
    changing = blocks.static is None or may_change_inside(fact)
    return _gather(context, value, fact.rank or 0, rows, edge, keys, members=context.replicas, changing=changing)


def _gather(
    context: Context,
    value: Value,
    rank: int,
    rows: _Rows | None,
    edge: EdgePlan,
    keys: Keys,
    *,
    members: int,
    changing: bool,
) -> Value:
    """Gather along dimension 0, one member per instance of `value`; `rows` is None where all are equally long."""
    name, span = value.node.name, value.node.span

    def add(op: str, inputs: Sequence[Value], what: str, **attrs: object) -> Value:
        node = context.add(op, inputs, name=f"{name}/gather/{what}", span=span, origin=value.node, attrs=attrs or None)
        return node.output()

    def const(content: object, what: str) -> Value:
        return context.const(content, np.int32, name=f"{name}/gather/{what}", near=value)

    ready = value
    if rows is not None:
        corner = np.zeros((rank, 2), np.int32)
        corner[0, 1] = 1
        missing = add("Sub", [rows.longest, rows.mine], "missing")
        ready = add("Pad", [value, add("Mul", [missing, const(corner, "after")], "padding")], "pad")
    sent = flat(context, ready) if changing and rank > 1 else ready
    gathered = add(
        "CollectiveGatherV2",
        [sent, *keys(context, edge, sent, changing=changing)],
        "all_gather",
        **collective_attrs(context, edge),
    )
    if sent is not ready:
        times = const([members] + [1] * (rank - 1), "times")
        gathered = add(
            "Reshape", [gathered, add("Mul", [add("Shape", [ready], "shape"), times], "whole_shape")], "unflat"
        )
    if rows is None:
        return gathered
    one, zero = const(1, "one"), const(0, "zero")
    # Row i of member r lies at r * longest + i in the padded result; keep those with i < length of r.
    places = add("Range", [zero, rows.longest, one], "places")
    mask = add("Less", [places, add("ExpandDims", [rows.lengths, one], "limits")], "mask")
    line = const([-1], "line")
    kept = add("Reshape", [add("Where", [add("Reshape", [mask, line], "flat_mask")], "where"), line], "kept")
    return add("GatherV2", [gathered, kept, zero], "rows", batch_dims=0)
