"""Guard ops whose kernels mishandle a block without examples (a last batch smaller than the number of replicas).

    Conv2D(x)                  on an empty float32 block gives the shape of x (oneDNN): reshaped to what it should be
    %dw = SomeGradient(...)    returns uninitialised memory: replaced by zeros where the block is empty

A batch of static size has at least one example for each replica, so it needs no guard.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.analysis.dims import unit
from autograph_rewrite.analysis.fact import PARTIAL, Fact
from autograph_rewrite.analysis.rules.empty import UNDEFINED_WHEN_EMPTY
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.context import Context

WRONG_SHAPE_WHEN_EMPTY = frozenset(("Conv2D", "Conv3D", "DepthwiseConv2dNative"))
ONEDNN_TYPES = frozenset((dtypes.FLOAT, dtypes.HALF, dtypes.BFLOAT16))


def guard_empty_blocks(context: Context, blocks: Blocks) -> None:
    """Insert the guards; runs before reshards, so that partial results are combined after it."""
    if blocks.static is not None:
        return
    for node in context.state.order:
        if node.span is not Span.EACH:
            continue
        fact = context.state.facts.get(node.output())
        if fact is None:
            continue
        if node.op in WRONG_SHAPE_WHEN_EMPTY and fact.dtype in ONEDNN_TYPES and fact.placement.is_split:
            _reshape(context, node, fact, blocks)
        elif node.op in UNDEFINED_WHEN_EMPTY:
            for index, each in enumerate(context.state.answers[node].outputs):
                if each.placement == PARTIAL:
                    _or_zeros(context, node.output(index), blocks)


def _take_over(context: Context, value: Value, new: Value, kept: set[Node]) -> None:
    """Let `new` stand for `value`, also in what is known about it."""
    value.replace_all_uses_with(new, keep=kept)
    state = context.state
    state.facts[new] = state.facts[value]
    if value in state.raw:
        state.raw[new] = state.raw[value]
    if value in state.reduced:
        state.reduced.add(new)
    edge_key = (value.name, "replicated")
    if edge_key in context.edges:
        context.edges[new.name, "replicated"] = context.edges[edge_key]


def _reshape(context: Context, node: Node, fact: Fact, blocks: Blocks) -> None:
    value, dim, rows = node.output(), fact.placement.dim, unit(fact.split_size)
    if rows is None or fact.shape is None or not all(isinstance(d, int) for i, d in enumerate(fact.shape) if i != dim):
        return
    # Grappler removes a reshape to a constant shape that it believes the value to have already.
    fixed = [0 if i == dim else d for i, d in enumerate(fact.shape)]
    at = [int(i == dim) for i in range(len(fact.shape))]

    def add(op: str, a: Value, b: Value, what: str) -> Value:
        return context.add(op, [a, b], name=f"{node.name}/{what}", span=Span.EACH, origin=node).output()

    count = context.bring(blocks.rows("count", rows), value)
    own = add("Mul", count, context.const(at, np.int32, name=f"{node.name}/at", near=value), "rows")
    shape = add("AddV2", own, context.const(fixed, np.int32, name=f"{node.name}/fixed", near=value), "shape")
    guard = context.add("Reshape", [value, shape], name=f"{node.name}/or_empty", span=Span.EACH, origin=node)
    _take_over(context, value, guard.output(), {guard})


def _or_zeros(context: Context, value: Value, blocks: Blocks) -> None:
    name = value.node.name
    zero = context.const(0, np.int32, name=f"{name}/none", near=value)
    count = context.bring(blocks.count, value)
    filled = context.add("Greater", [count, zero], name=f"{name}/has_examples", span=Span.EACH, origin=value.node)
    zeros = context.add("ZerosLike", [value], name=f"{name}/zeros", span=Span.EACH, origin=value.node)
    inputs = [filled.output(), value, zeros.output()]
    guard = context.add("SelectV2", inputs, name=f"{name}/or_zeros", span=Span.EACH, origin=value.node)
    _take_over(context, value, guard.output(), {guard, zeros})
