"""Reduce many small gradients with one collective.

    before   CollectiveReduceV2(%dw1)   CollectiveReduceV2(%dw2)
    after    CollectiveReduceV2(Concat(flat %dw1, flat %dw2)) ──SplitV──► dw1, dw2

A bucket is filled in the order in which the backward pass produces its members, so that it can leave while the rest is
still being computed. Members must be ready together: none may depend on the reduction of another, and none may be in a
loop or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autograph_rewrite.analysis.fact import PARTIAL
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.frames import unconditional
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.ir.walk import dependencies
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.compress_choice import HALVES
from autograph_rewrite.passes.compress_halves import Halved, add_halves
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.exchange import add_up
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.passes.scope import Scope
from autograph_rewrite.plan.devices import parse
from autograph_rewrite.plan.lowerings import HOST
from autograph_rewrite.plan.parts import STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan

TOO_LARGE_TO_COPY = 128 * 1024
"""Bytes from which on, between devices of one memory, packing a value into a bucket takes longer than a collective of
its own (about 50 us)."""
Key = tuple[str, str]


def assign_buckets(plan: Plan, state: Propagation, edges: Mapping[Key, EdgePlan]) -> list[EdgePlan]:
    """Return the edges with bucket numbers.

    Args:
        plan: the request, with `bucket_bytes` per variable.
        state: the placements.
        edges: by (value, target), in graph order.
    """
    candidates = {edge.value for edge in edges.values() if edge.owner != STEP and _is_summed(edge)}
    if not candidates:
        return list(edges.values())
    depths = _depths(state)
    in_memory = len(plan.processes) == 1 and all(parse(device).kind == "CPU" for device in plan.devices)
    number = 0
    open_buckets: dict[object, tuple[int, int]] = {}  # kind -> (number, bytes so far)
    chosen: dict[Key, int] = {}
    for key, edge in edges.items():
        value = state.graph.value(edge.value) if edge.value in candidates and edge.to == "replicated" else None
        depth = depths.get(value.node) if value is not None else None
        if value is None or depth is None or not _is_fixed(state, value):
            continue
        options = plan.options_of(edge.owner)
        if not 0 < edge.bytes < options.bucket_bytes or (in_memory and edge.bytes >= TOO_LARGE_TO_COPY):
            continue
        kind = (edge.dtype, options.hint, edge.compressor, options.bucket_bytes, depth)
        current, filled = open_buckets.get(kind, (0, 0))
        if not current or filled + edge.bytes > options.bucket_bytes:
            number += 1
            current, filled = number, 0
        open_buckets[kind] = current, filled + edge.bytes
        chosen[key] = current
    members = list(chosen.values())
    alone = {bucket for bucket in members if members.count(bucket) == 1}
    return [
        replace(edge, bucket=chosen[key]) if key in chosen and chosen[key] not in alone else edge
        for key, edge in edges.items()
    ]


def _is_summed(edge: EdgePlan) -> bool:
    """Return whether a collective adds the value up, element by element."""
    if edge.compressor == "none":
        return edge.lowering == "collective_reduce"
    return edge.compressor in HALVES and edge.is_collective and edge.lowering not in HOST


def _is_fixed(state: Propagation, value: Value) -> bool:
    fact = state.source(value)
    return fact.placement == PARTIAL and not combine.may_change(fact)


def _depths(state: Propagation) -> dict[Node, int]:
    """Return, for nodes outside of loops and branches, how many reductions lie one behind the other before them."""
    sources = {value.node for value in state.reduced}
    depths: dict[Node, int] = dict.fromkeys(state.order, 0)
    first = next((i for i, node in enumerate(state.order) if node in sources), len(state.order))
    for node in state.order[first + 1 :]:
        depth = max([depths[producer] for producer in dependencies(node)], default=0)
        depths[node] = depth + any([value in state.reduced for value in node.inputs])
    certain = unconditional(state.order)
    return {node: depth for node, depth in depths.items() if node in certain}


def reduce_bucket(
    context: Context, members: Sequence[tuple[Value, EdgePlan]], keys: Keys
) -> Iterable[tuple[Value, Value]]:
    """Reduce several partial values with one collective; yield each with its sum."""
    first, edge = members[0]
    name = f"autograph_bucket_{edge.bucket}"

    def add(op: str, inputs: Sequence[Value], what: str, origin: Node, **attrs: object) -> Node:
        return context.add(op, inputs, name=f"{name}/{what}", span=Span.EACH, origin=origin, attrs=attrs or None)

    line = context.const([-1], np.int32, name=f"{name}/line", near=first)
    axis = context.const(0, np.int32, name=f"{name}/axis", near=first)
    facts = [context.fact(value) for value, _ in members]
    wire = combine.wire_type(facts[0].dtype, "sum")
    halved: list[Halved] = []
    if edge.compressor in HALVES:
        halved = [Halved(context, context.current(value), context.fact(value), edge) for value, edge in members]
        sent = [one.code for one in halved]
    else:
        sent = [combine.cast(context, context.current(value), wire, f"{value.node.name}/widen") for value, _ in members]
    flat = [add("Reshape", [value, line], "flat", value.node).output() for value in sent]
    joined = add("ConcatV2", [*flat, axis], "concat", first.node, N=len(flat)).output()
    scope = Scope(context, first, name)
    total = add_halves(scope, joined, edge, keys, wire) if halved else add_up(scope, joined, edge, keys)
    shapes = [[dim for dim in fact.shape or () if isinstance(dim, int)] for fact in facts]
    sizes = context.const([int(np.prod(shape)) for shape in shapes], np.int32, name=f"{name}/sizes", near=first)
    parts = add("SplitV", [total, sizes, axis], "split", first.node, num_split=len(members))
    for index, ((value, _), fact, shape) in enumerate(zip(members, facts, shapes, strict=True)):
        operand = context.const(shape, np.int32, name=f"{value.node.name}/shape", near=value)
        whole = add("Reshape", [parts.output(index), operand], "whole", value.node).output()
        if halved:
            yield value, halved[index].decoded(whole)
        else:
            yield value, combine.cast(context, whole, fact.dtype, f"{value.node.name}/narrow")
