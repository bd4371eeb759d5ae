"""Emit all-reduces: contributions of all replicas become one value, in one process and among several.

    shared               AddN(all(%dw))                              runs once, on the first device
    mirrored             CollectiveReduceV2(%dw, keys)               runs on every device, same result on all
    shared, processes    CollectiveReduceV2(AddN(all(%dw)), keys)    runs once in every process
    micro-batches        CollectiveReduceV2(AddN(all(%dw)), keys)    mirrored: each replica adds up its own first
    one-shot             AddN(Split(CollectiveGatherV2(%dw, keys)))  small, between processes: in half as many messages

The edge's lowering lists the hops; the medium of each chooses the function that emits it (`REDUCE`). Half-precision
sums are sent as float32, and logical reductions as int32, which collectives support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.traits import REDUCED_BY
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.collectives import local_ops
from autograph_rewrite.passes.collectives.exchange import Exchange, between_processes, span_behind
from autograph_rewrite.passes.collectives.key_operands import collective_attrs
from autograph_rewrite.passes.collectives.padded_gather import gather_equal
from autograph_rewrite.passes.collectives.server_stores import accumulate_at_server, reduce_at_server
from autograph_rewrite.passes.collectives.wire_values import cast, decode, encode, flat
from autograph_rewrite.plan.parts.lowerings import ONE_SHOT, Hop, Medium
from autograph_rewrite.resolve.wire_types import may_change, wire_type

MERGES = {"sum": "Add", "max": "Max", "min": "Min", "prod": "Mul", "all": "Min", "any": "Max"}
"""By reduction, the `merge_op` of a collective."""
ANY_REDUCTION = "add_n"
"""The lowering of a value that the plan does not name."""


class ReduceSpec(NamedTuple):
    """How a hop combines contributions.

    Attributes:
        op: sum, max, min, prod, all or any.
        changing: the shape of a contribution may differ between steps.
        name: prefix of the names of new nodes; "": the name of the hop's value.
    """

    op: str
    changing: bool = False
    name: str = ""

    def name_for(self, value: Value) -> str:
        """Return the prefix of the names of the nodes for a value."""
        return self.name or value.node.name


def _by_ops(exchange: Exchange, hop: Hop, value: Value, reduction: ReduceSpec) -> Value:
    role, name = exchange.edge.role if exchange.edge is not None else "", reduction.name_for(value)
    return local_ops.reduce_local(exchange.rewrite, value, reduction.op, name, role, span=span_behind(hop))


def _by_collective(exchange: Exchange, hop: Hop, value: Value, reduction: ReduceSpec) -> Value:
    """Combine the values of a collective's members: one per replica, or one per process for a value that runs once.

    Raises:
        PassError: no collective can combine values of this type.
    """
    rewrite, edge, build = exchange.rewrite, exchange.planned, FoldedBuilder.of(exchange.rewrite, value, reduction.name)
    name = value.node.name
    coded = encode(rewrite, value, reduction.op, name)
    ready = flat(rewrite, coded) if reduction.changing else coded
    keys = exchange.keys(rewrite, edge, ready, changing=reduction.changing)
    attrs = collective_attrs(rewrite, edge) | {"merge_op": MERGES[reduction.op], "final_op": "Id"}
    total = build.op("CollectiveReduceV2", ready, *keys, what="all_reduce", **attrs)
    if reduction.changing:
        total = build.op("Reshape", total, build.op("Shape", coded, what="shape"), what="unflat")
    return decode(rewrite, total, value.dtype, name)


def _in_one_shot(exchange: Exchange, hop: Hop, value: Value, reduction: ReduceSpec) -> Value:
    """Gather the values of a collective's members, and combine them on each, in the same order everywhere.

    Raises:
        PassError: no collective can carry values of this type.
    """
    rewrite, name = exchange.rewrite, value.node.name
    build = FoldedBuilder.of(rewrite, value, reduction.name)
    coded = encode(rewrite, value, reduction.op, name)
    line = flat(rewrite, coded)
    gathered = gather_equal(exchange, line, value, changing=reduction.changing, name=build.name)
    if reduction.op == "sum":  # by AddN, whose order of additions does not depend on the processor
        parts = build.op("Split", build.numbers(0, "axis"), gathered, what="parts", num_split=exchange.members).node
        each = [parts.output(member) for member in range(exchange.members)]
        total = build.op("AddN", *each, what="add_n", N=exchange.members)
    else:
        rows = build.op("Reshape", gathered, build.numbers([exchange.members, -1], "members"), what="parts")
        total = build.op(REDUCED_BY[reduction.op], rows, build.numbers(0, "axis"), what="fold")
    total = build.op("Reshape", total, build.op("Shape", coded, what="shape"), what="unflat")
    return decode(rewrite, total, value.dtype, name)


Reducer = Callable[[Exchange, Hop, Value, ReduceSpec], Value]
REDUCE: dict[tuple[Medium, str], Reducer] = {
    (Medium.OPS, ""): _by_ops,
    (Medium.COLLECTIVE, ""): _by_collective,
    (Medium.COLLECTIVE, ONE_SHOT): _in_one_shot,
    (Medium.ACCUMULATOR, ""): accumulate_at_server,
    (Medium.QUEUE, ""): reduce_at_server,
}
"""By medium and algorithm of a hop, the function that emits it."""


def reduce_hops(exchange: Exchange, hops: tuple[Hop, ...], value: Value, reduction: ReduceSpec) -> Value:
    """Return the contributions after some hops have combined them, in the wire type.

    Args:
        hops: of the edge's lowering, in order.
        value: that of each member of the first hop, in the wire type.

    Raises:
        PassError: a hop cannot combine values of this type.
    """
    for i, hop in enumerate(hops):
        value = REDUCE[hop.medium, hop.algorithm](exchange, hop, value, reduction._replace(name="") if i else reduction)
    return value


def all_reduce(exchange: Exchange, value: Value, fact: Fact) -> Value:
    """Return the sum (or maximum, ...) of all replicas' contributions, on the devices of the lowering's last hop.

    Args:
        fact: of the contributions: partial.

    Raises:
        PassError: a hop cannot combine values of this type.
    """
    rewrite, op, name = exchange.rewrite, fact.placement.op, value.node.name
    hops = exchange.hops(ANY_REDUCTION)
    wide = cast(rewrite, value, wire_type(fact.dtype, op), f"{name}/widen")
    first = name if hops[0].medium is Medium.OPS else ""
    total = reduce_hops(exchange, hops, wide, ReduceSpec(op, may_change(fact), first))
    return cast(rewrite, total, fact.dtype, f"{name}/narrow")


def reduce_between_processes(exchange: Exchange, value: Value, op: str, *, changing: bool) -> Value:
    """Return the combined values of all processes; each process has one.

    Args:
        value: of this process, in the wire type; runs once.
        op: sum, max, min, prod, all or any.
        changing: whether the shape may differ between steps.
    """
    return reduce_hops(exchange, between_processes(exchange.planned.lowered.hops), value, ReduceSpec(op, changing))


def contribution(exchange: Exchange, value: Value, fact: Fact, hops: tuple[Hop, ...]) -> Value:
    """Return the contribution of one member of the last hop to a sum, in the type of the sum.

    Args:
        exchange: of an edge whose last hop sends the contribution in another form (`passes.compression`).
        fact: of the value.
        hops: those before the last.
    """
    wide = cast(exchange.rewrite, value, wire_type(fact.dtype, "sum"), f"{value.node.name}/widen")
    return reduce_hops(exchange, hops, wide, ReduceSpec("sum", name=value.node.name))


def sum_of_members(exchange: Exchange, value: Value, name: str) -> Value:
    """Return the sum over the members of the last hop, in the type of `value`.

    Args:
        exchange: of an edge that is lowered as a sum.
        value: of a fixed shape.
        name: prefix of the names of new nodes.
    """
    return reduce_hops(exchange, exchange.planned.lowered.hops[-1:], value, ReduceSpec("sum", name=name))
