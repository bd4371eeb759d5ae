"""Guard ops whose kernels mishandle a block without examples (a last batch smaller than the number of replicas).

    before   %y = Conv2D(%x, w)
    after    %y = first rows of Conv2D(%x padded to at least one row, w)

TensorFlow's oneDNN kernels give an empty block a wrong shape, or abort the process (`needs_a_row`). Padding by nothing
and slicing everything forward their input, so a block with examples pays only for starting the ops. A few other
kernels leave their output uninitialised (`undefined_when_empty`): zeros take its place where the block is empty. The
statistics of an empty block (`batch_norm: local`) are NaN: moving averages use those of the other blocks.
A batch of static size has at least one example for each replica, so it needs no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autograph_rewrite.analysis.transfer import convert
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import EACH, ONCE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, Fact
from autograph_rewrite.ops.facts.symbolic_dims import rows_per_example
from autograph_rewrite.ops.rules.marked import AVERAGE, MEAN, OF_BLOCK, SUM, marked
from autograph_rewrite.ops.rules.normalization import is_of_block
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.local_sgd.train_alone import trains_alone
from autograph_rewrite.passes.reshard.insert_reshards import Reshards

ONEDNN_TYPES = frozenset((dtypes.FLOAT, dtypes.HALF, dtypes.BFLOAT16))


def _pad_empty_blocks(rewrite: Rewrite) -> None:
    """Pad empty blocks for kernels that cannot take one (a last batch smaller than N)."""
    if rewrite.get(Blocks).static is not None:
        return
    guard = _Guard(rewrite, rewrite.get(Reshards).blocks_at)  # conversions are inserted: inputs are blocks
    for node in rewrite.state.order:
        if node.span != EACH:
            continue
        if has(node.op, "refuses_empty") or (has(node.op, "needs_a_row") and _is_one_dnn(rewrite, node)):
            guard.give_a_row(node)
        elif node.op == "Conv2DBackpropFilter" and _is_one_dnn(rewrite, node):
            guard.give_a_row_with_bias(node)
        elif node.op.startswith("FusedBatchNorm") and "Grad" not in node.op and is_of_block(node):
            for index in (1, 2):
                guard.average_of_filled(node.output(index))
        elif (of_block := marked(node, OF_BLOCK)) == SUM:
            guard.zeros_when_empty(node.output())
        elif of_block in (AVERAGE, MEAN):
            guard.average_of_filled(node.inputs[0], only=node)
        elif has(node.op, "undefined_when_empty"):
            for index, fact in enumerate(rewrite.state.transfers[node].outputs):
                if fact.placement == PARTIAL:
                    guard.zeros_when_empty(node.output(index))


def _is_one_dnn(rewrite: Rewrite, node: Node) -> bool:
    """Return whether a convolution's kernel is oneDNN's."""
    return rewrite.state.facts[node.output()].dtype in ONEDNN_TYPES


class _Guard:
    """Adds the guards; a value that several ops read is padded once.

    Args:
        blocks_at: returns the blocks of the batch input that a node's sizes come from.
    """

    def __init__(self, rewrite: Rewrite, blocks_at: Callable[[Node], Blocks]) -> None:
        self._rewrite = rewrite
        self._blocks_at = blocks_at
        self._padded: dict[Value, Value] = {}

    def give_a_row(self, node: Node) -> None:
        """Pad the split inputs of `node` to at least one row and cut its split outputs."""
        transferred, batch = self._rewrite.state.transfers[node], self._rewrite.state.semantics.extent.units
        inputs = {}
        for index, fact in enumerate(transferred.inputs):
            reshard = transferred.operand_reshards.get(index)
            fact = convert(fact, reshard, batch) if reshard is not None else fact
            if fact.placement.is_split:
                inputs[index] = fact
        outputs = {i: fact for i, fact in enumerate(transferred.outputs) if fact.placement.is_split}
        if not inputs or any(fact.shape is None for fact in inputs.values()):
            return
        rows = {index: self._rows(node, node.inputs[index], fact) for index, fact in inputs.items()}
        for index, fact in inputs.items():
            node.set_input(index, self._pad(node.inputs[index], fact, rows[index]))
        for index, fact in outputs.items():
            self._cut(node.output(index), fact, next(iter(rows.values())))  # outputs have the rows of the inputs

    def give_a_row_with_bias(self, node: Node) -> None:
        """Guard the gradient of a filter if oneDNN merges it with the bias gradient of the same value."""
        gradient = node.inputs[2]
        biases = [use.node for use in gradient.uses if use.node.op == "BiasAddGrad" and use.node.span == EACH]
        if biases:
            self.give_a_row(node)
        for bias in biases:
            bias.set_input(0, node.inputs[2])  # so that oneDNN still merges them

    def _add(self, op: str, inputs: list[Value], near: Value, what: str, **attrs: Any) -> Value:
        return FoldedBuilder.of(self._rewrite, near, span=EACH).op(op, *inputs, what=what, **attrs)

    def _const(self, content: object, near: Value, what: str) -> Value:
        return self._rewrite.const(content, np.int32, name=f"{near.node.name}/{what}", near=near)

    def _rows(self, node: Node, value: Value, fact: Fact) -> Value:
        """Return the number of rows of a block: from its number of examples, or measured."""
        rows = rows_per_example(fact.split_size)
        if rows is not None:
            return self._blocks_at(node).rows("count", rows)
        dim = fact.placement.dim
        limits = [self._const([at], value, what) for at, what in ((dim, "dim"), (dim + 1, "after"), (1, "step"))]
        shape = self._add("Shape", [value], value, "shape")
        return self._add("StridedSlice", [shape, *limits], value, "size", shrink_axis_mask=1)

    def _pad(self, value: Value, fact: Fact, rows: Value) -> Value:
        if value not in self._padded:
            rank = len(fact.shape or ())
            end = np.zeros((rank, 2), np.int32)
            end[fact.placement.dim, 1] = 1
            one, zero = self._const(1, value, "one"), self._const(0, value, "none")
            missing = self._add("Maximum", [self._add("Sub", [one, rows], value, "lack"), zero], value, "missing")
            paddings = self._add("Mul", [missing, self._const(end, value, "end")], value, "paddings")
            nothing = self._rewrite.const(0, np.float32, name=f"{value.node.name}/nothing", near=value)
            if fact.dtype != dtypes.FLOAT:
                nothing = self._add("Cast", [nothing], value, "nothing", DstT=fact.dtype)
            # oneDNN would merge a `Pad` into the convolution, which applies paddings of height and width only.
            padded = self._add("PadV2", [value, paddings, nothing], value, "or_one_row")
            self._padded[value] = padded
        return self._padded[value]

    def _cut(self, value: Value, fact: Fact, rows: Value) -> None:
        dim = fact.placement.dim
        at = np.zeros(dim + 1, np.int32)
        at[dim] = 1
        end = self._add("Mul", [rows, self._const(at, value, "at")], value, "rows")
        begin, step = self._const(0 * at, value, "begin"), self._const(np.ones_like(at), value, "step")
        before = (1 << dim) - 1
        inputs = [value, begin, end, step]
        kept = self._add("StridedSlice", inputs, value, "rows_of_block", begin_mask=before, end_mask=before)
        value.replace_all_uses_with(kept, keep={kept.node})
        self._rewrite.take_place(value, kept)
        self._padded[kept] = value  # the next guarded op reads the padded value as it is

    def zeros_when_empty(self, value: Value) -> None:
        """Replace a contribution by zeros where the block is empty."""
        chosen, zeros = self._or_zeros(value)
        value.replace_all_uses_with(chosen, keep={chosen.node, zeros.node})
        self._rewrite.take_place(value, chosen)

    def average_of_filled(self, value: Value, only: Node | None = None) -> None:
        """Leave empty blocks out of a statistic that is averaged over all replicas.

        Args:
            only: the node that averages it; None: all its readers, except the gradient of the batch normalisation.
        """
        chosen, zeros = self._or_zeros(value)
        rewrite, name, blocks = self._rewrite, value.node.name, self._blocks_at(value.node)
        replicas = rewrite.const(rewrite.replicas, np.int32, name=f"{name}/replicas", near=blocks.batch)

        once = FoldedBuilder.of(rewrite, value, span=ONCE).op
        if rewrite.processes == 1:
            filled = once("Minimum", blocks.batch, replicas, what="filled")
        else:
            one, axis = (rewrite.const(n, np.int32, name=f"{name}/{n}", near=blocks.batch) for n in (1, 0))
            filled = once("Sum", once("Minimum", blocks.lengths, one, what="is_filled"), axis, what="filled")
        numbers = [once("Cast", n, what="number", DstT=value.dtype) for n in (replicas, filled)]
        share = once("RealDiv", *numbers, what="share")
        scaled = self._add("Mul", [chosen, share], value, "of_filled")
        if only is not None:
            only.set_input(0, scaled)
            return
        gradients = {use.node for use in value.uses if use.node.op.startswith("FusedBatchNormGrad")}
        value.replace_all_uses_with(scaled, keep={chosen.node, zeros.node, *gradients})
        rewrite.take_place(value, scaled)

    def _or_zeros(self, value: Value) -> tuple[Value, Value]:
        count = self._blocks_at(value.node).count
        filled = self._add("Greater", [count, self._const(0, value, "none")], value, "has_examples")
        zeros = self._add("ZerosLike", [value], value, "zeros")
        return self._add("SelectV2", [filled, value, zeros], value, "or_zeros"), zeros


PAD_EMPTY_BLOCKS = Pass(
    "pad-empty-blocks", _pad_empty_blocks, lambda rewrite: not trains_alone(rewrite), (Homes, Blocks, Reshards)
)
