"""Reduce many small gradients with one collective.

    before   CollectiveReduceV2(%dw1)   CollectiveReduceV2(%dw2)
    after    CollectiveReduceV2(Concat(flat %dw1, flat %dw2)) ──SplitV──► dw1, dw2

A bucket is filled in the order in which the backward pass produces its members, so that it can leave while the rest is
still being computed. Members must be ready together: none may depend on the reduction of another, and none may be in a
loop or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.passes.base.builder import Builder
from autograph_rewrite.passes.base.context import Context, Site
from autograph_rewrite.passes.collectives.all_reduce import contribution, sum_of_members
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.passes.collectives.wire_values import cast
from autograph_rewrite.passes.compression.cast16 import Cast16, add_cast16
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import SIXTEEN_BIT


def reduce_bucket(
    context: Context, members: Sequence[tuple[Value, EdgePlan]], keys: Keys
) -> Iterable[tuple[Value, Value]]:
    """Reduce several partial values with one collective; yield each with its sum.

    Args:
        context: the rewrite.
        members: partial values with their edges, of one element type.
        keys: makes the collective's keys.
    """
    first, edge = members[0]
    name = f"autograph_bucket_{edge.bucket}"

    def add(op: str, inputs: Sequence[Value], what: str, origin: Node, **attrs: object) -> Node:
        return context.add(op, inputs, Site(f"{name}/{what}", span, origin), attrs=attrs or None)

    line = context.const([-1], np.int32, name=f"{name}/line", near=first)
    axis = context.const(0, np.int32, name=f"{name}/axis", near=first)
    facts = [context.fact(value) for value, _ in members]
    wire = wire_types.wire_type(facts[0].dtype, "sum")
    halved: list[Cast16] = []
    if edge.compressor in SIXTEEN_BIT:
        halved = [
            Cast16(Exchange(context, keys, edge), context.current(value), context.fact(value))
            for value, edge in members
        ]
        sent = [one.code for one in halved]
    else:
        sent = [
            contribution(Exchange(context, keys, edge), context.current(value), context.fact(value))
            for value, edge in members
        ]
    span = sent[0].node.span  # of what one member sends
    flat = [add("Reshape", [value, line], "flat", value.node).output() for value in sent]
    joined = add("ConcatV2", [*flat, axis], "concat", first.node, N=len(flat)).output()
    build = Builder.of(context, first, name, span=span)
    exchange = Exchange(context, keys, edge)
    total = add_cast16(exchange, build, joined, wire) if halved else sum_of_members(exchange, joined, name)
    shapes = [[dim for dim in fact.shape or () if isinstance(dim, int)] for fact in facts]
    sizes = context.const([int(np.prod(shape)) for shape in shapes], np.int32, name=f"{name}/sizes", near=first)
    parts = add("SplitV", [total, sizes, axis], "split", first.node, num_split=len(members))
    for index, ((value, _), fact, shape) in enumerate(zip(members, facts, shapes, strict=True)):
        operand = context.const(shape, np.int32, name=f"{value.node.name}/shape", near=value)
        whole = add("Reshape", [parts.output(index), operand], "whole", value.node).output()
        if halved:
            yield value, halved[index].decoded(whole)
        else:
            yield value, cast(context, whole, fact.dtype, f"{value.node.name}/narrow")
