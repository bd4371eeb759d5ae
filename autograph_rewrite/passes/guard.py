"""Guard ops whose kernels mishandle a block without examples (a last batch smaller than the number of replicas).

    before   %y = Conv2D(%x, w)
    after    %y = first rows of Conv2D(%x padded to at least one row, w)

TensorFlow's oneDNN kernels give an empty block a wrong shape, or abort the process (`NEEDS_A_ROW`). Padding by nothing
and slicing everything forward their input, so a block with examples pays only for starting the ops. A few other
kernels leave their output uninitialised (`UNDEFINED_WHEN_EMPTY`): zeros take its place where the block is empty.
A batch of static size has at least one example for each replica, so it needs no guard.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.analysis.answer import convert
from autograph_rewrite.analysis.dims import unit
from autograph_rewrite.analysis.fact import PARTIAL, Fact
from autograph_rewrite.analysis.rules.empty import UNDEFINED_WHEN_EMPTY
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.context import Context

NEEDS_A_ROW = frozenset(
    (
        "Conv2D",
        "Conv3D",
        "DepthwiseConv2dNative",
        "MaxPool",
        "MaxPoolGrad",
        "MaxPool3D",
        "MaxPool3DGrad",
        "LRN",
        "LRNGrad",
    )
)
"""Convolutions return the shape of their input; the others share a workspace with their gradient that is never made.

Found by running each op on an empty float32 block; TensorFlow 2.21, CPU.
"""
ONEDNN_TYPES = frozenset((dtypes.FLOAT, dtypes.HALF, dtypes.BFLOAT16))


def guard_empty_blocks(context: Context, blocks: Blocks) -> None:
    """Insert the guards; runs after the reshards, so that the inputs are the blocks that the kernels see."""
    if blocks.static is not None:
        return
    guard = _Guard(context, blocks)
    for node in context.state.order:
        if node.span is not Span.EACH:
            continue
        if node.op in NEEDS_A_ROW and context.state.facts[node.output()].dtype in ONEDNN_TYPES:
            guard.give_a_row(node)
        elif node.op in UNDEFINED_WHEN_EMPTY:
            for index, fact in enumerate(context.state.answers[node].outputs):
                if fact.placement == PARTIAL:
                    guard.zeros_when_empty(node.output(index))


class _Guard:
    """Makes the guards; values that several ops need are padded once."""

    def __init__(self, context: Context, blocks: Blocks) -> None:
        self._context = context
        self._blocks = blocks
        self._padded: dict[Value, Value] = {}

    def give_a_row(self, node: Node) -> None:
        """Pad the split inputs of `node` to at least one row and cut its split outputs."""
        state = self._context.state
        answer = state.answers[node]
        inputs = {}
        for index, value in enumerate(answer_inputs(self._context, node)):
            if value.placement.is_split:
                inputs[index] = value
        outputs = {i: fact for i, fact in enumerate(answer.outputs) if fact.placement.is_split}
        if any(unit(fact.split_size) is None for fact in (*inputs.values(), *outputs.values())):
            return  # blocks of unknown unit: their emptiness cannot be told
        for index, fact in inputs.items():
            node.set_input(index, self._pad(node.inputs[index], fact))
        for index, fact in outputs.items():
            self._cut(node.output(index), fact)

    def _add(self, op: str, inputs: list[Value], near: Value, what: str, **attrs: object) -> Value:
        name = f"{near.node.name}/{what}"
        node = self._context.add(op, inputs, name=name, span=Span.EACH, origin=near.node, attrs=attrs or None)
        return node.output()

    def _const(self, content: object, near: Value, what: str) -> Value:
        return self._context.const(content, np.int32, name=f"{near.node.name}/{what}", near=near)

    def _rows(self, near: Value, fact: Fact) -> Value:
        return self._context.bring(self._blocks.rows("count", unit(fact.split_size) or 1), near)

    def _pad(self, value: Value, fact: Fact) -> Value:
        if value not in self._padded:
            rank = len(fact.shape or ())
            end = np.zeros((rank, 2), np.int32)
            end[fact.placement.dim, 1] = 1
            one, zero = self._const(1, value, "one"), self._const(0, value, "none")
            missing = self._add(
                "Maximum", [self._add("Sub", [one, self._rows(value, fact)], value, "lack"), zero], value, "missing"
            )
            paddings = self._add("Mul", [missing, self._const(end, value, "end")], value, "paddings")
            padded = self._add("Pad", [value, paddings], value, "or_one_row")
            self._padded[value] = padded
        return self._padded[value]

    def _cut(self, value: Value, fact: Fact) -> None:
        dim = fact.placement.dim
        at = np.zeros(dim + 1, np.int32)
        at[dim] = 1
        end = self._add("Mul", [self._rows(value, fact), self._const(at, value, "at")], value, "rows")
        begin, step = self._const(0 * at, value, "begin"), self._const(np.ones_like(at), value, "step")
        before = (1 << dim) - 1
        inputs = [value, begin, end, step]
        kept = self._add("StridedSlice", inputs, value, "rows_of_block", begin_mask=before, end_mask=before)
        value.replace_all_uses_with(kept, keep={kept.node})
        self._context.aliases[value] = kept
        self._padded[kept] = value  # the next guarded op reads the padded value as it is

    def zeros_when_empty(self, value: Value) -> None:
        """Replace a contribution by zeros where the block is empty."""
        count = self._context.bring(self._blocks.count, value)
        filled = self._add("Greater", [count, self._const(0, value, "none")], value, "has_examples")
        zeros = self._add("ZerosLike", [value], value, "zeros")
        chosen = self._add("SelectV2", [filled, value, zeros], value, "or_zeros")
        value.replace_all_uses_with(chosen, keep={chosen.node, zeros.node})
        self._context.aliases[value] = chosen


def answer_inputs(context: Context, node: Node) -> list[Fact]:
    """Return what is known about the inputs of an original node as they are after conversion.

    Args:
        context: the rewrite.
        node: a node of the original graph.
    """
    return [
        convert(fact, want, context.state.semantics.batch) if want is not None else fact
        for fact, want in context.state.seen_inputs(node)
    ]
