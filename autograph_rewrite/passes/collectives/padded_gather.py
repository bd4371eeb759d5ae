"""Gather by a collective from members with different numbers of rows: pad to the longest, and cut again.

[a a]  [b]   ──►  [a a | b .]  ──►  [a a b]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.accelerator import has_kernel
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import collective_attrs
from autograph_rewrite.passes.collectives.wire_values import flat


class Rows(NamedTuple):
    """How many rows the members of a gather have: this one, each, and the longest (int32)."""

    mine: Value
    lengths: Value
    longest: Value


def gather_equal(exchange: Exchange, sent: Value, near: Value, *, changing: bool, name: str) -> Value:
    """Return the concatenated values, equally large, of all members.

    Args:
        sent: the value of this member.
        near: the value that it encodes.
        changing: its shape may differ between steps.
        name: prefix of the names of new nodes.
    """
    rewrite, edge = exchange.rewrite, exchange.planned
    keys = exchange.keys(rewrite, edge, sent, changing=changing)
    build = FoldedBuilder.of(rewrite, near, name)
    return build.op("CollectiveGatherV2", sent, *keys, what="all_gather", **collective_attrs(rewrite, edge))


def gather_padded(exchange: Exchange, value: Value, rank: int, rows: Rows | None, *, changing: bool) -> Value:
    """Gather along dimension 0, one member per instance of `value`.

    Args:
        value: of each member, rows first.
        rows: None if all members have equally many.
        changing: the shape of a member's value may differ between steps.
    """
    build = FoldedBuilder.of(exchange.rewrite, value, f"{value.node.name}/gather")
    ready = value
    if rows is not None:
        missing = build.op("Sub", rows.longest, rows.mine, what="missing")
        pad = _padded if has_kernel(exchange.rewrite.plan.devices, "Pad", T=value.dtype) else _filled
        ready = pad(build, value, rank, missing)
    sent = flat(exchange.rewrite, ready) if changing and rank > 1 else ready
    gathered = gather_equal(exchange, sent, value, changing=changing, name=build.name)
    if sent is not ready:
        times = build.numbers([exchange.members] + [1] * (rank - 1), "times")
        whole = build.op("Mul", build.op("Shape", ready, what="shape"), times, what="whole_shape")
        gathered = build.op("Reshape", gathered, whole, what="unflat")
    return gathered if rows is None else _without_padding(build, gathered, rows)


def _padded(build: FoldedBuilder, value: Value, rank: int, missing: Value) -> Value:
    """Pad by TensorFlow's Pad."""
    corner = np.zeros((rank, 2), np.int32)
    corner[0, 1] = 1
    padding = build.op("Mul", missing, build.numbers(corner, "after"), what="padding")
    return build.op("Pad", value, padding, what="pad")


def _filled(build: FoldedBuilder, value: Value, rank: int, missing: Value) -> Value:
    """Pad by rows of zeros, for types that the device's Pad does not know."""
    dims = build.op("Mul", missing, build.numbers([1] + [0] * (rank - 1), "first"), what="more")
    if rank > 1:
        rest = build.numbers([0] + [1] * (rank - 1), "rest")
        others = build.op("Mul", build.op("Shape", value, what="own_shape"), rest, what="row")
        dims = build.op("AddV2", dims, others, what="padding")
    zeros = build.op("Fill", dims, build.const(0, value.dtype, "nothing"), what="zeros")
    return build.op("ConcatV2", value, zeros, build.numbers(0, "first_axis"), what="pad", N=2)


def _without_padding(build: FoldedBuilder, gathered: Value, rows: Rows) -> Value:
    """Keep, of row i of member r at r * longest + i, those with i < length of r."""
    one, zero = build.numbers(1, "one"), build.numbers(0, "zero")
    places = build.op("Range", zero, rows.longest, one, what="places")
    limits = build.op("ExpandDims", rows.lengths, one, what="limits")
    mask = build.op("Less", places, limits, what="mask")
    line = build.numbers([-1], "line")
    where = build.op("Where", build.op("Reshape", mask, line, what="flat_mask"), what="where")
    kept = build.op("Reshape", where, line, what="kept")
    return build.op("GatherV2", gathered, kept, zero, what="rows", batch_dims=0)
