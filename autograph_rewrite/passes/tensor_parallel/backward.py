"""Backward propagation: what is read in blocks only is made in blocks, where its operands can be cut instead.

    before   Einsum(mask, tokens) [E, C, d] ──► its block of experts ──► Einsum(., expert/part_k)
    after    mask [t, E, C] ──► its block of experts ──► Einsum(., tokens)/part_k ──► Einsum(., expert/part_k)

One walk against the order finds all such nodes: each has readers that take blocks of one dimension, whether they are
cut themselves or were just found to be. It goes on only where the operands that are cut have no more bytes than what
was cut, or where a contraction is divided. GSPMD (Xu et al., 2021) propagates both ways, too.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.reduction_placement import size_of
from autograph_rewrite.analysis.transfer import convert
from autograph_rewrite.analysis.transfer import transferred as answer_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.variable_ops import handle_node, is_handle
from autograph_rewrite.ops.facts.placement import Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import unit
from autograph_rewrite.ops.rules.base import WHOLE, LocalEntry, Slice
from autograph_rewrite.ops.rules.table import families, rule_of
from autograph_rewrite.ops.traits import EXITS, has
from autograph_rewrite.passes.tensor_parallel.segment_sums import SEGMENT_SUM

_CONTRACTIONS = families("contraction")


@dataclass
class BlockReads:
    """Which readers take blocks.

    Attributes:
        state: the placements.
        of: the block that a reader takes of an operand, where its rule does not say so.
        moved: the nodes that can be made in blocks, with the operand of each that has to be cut for that.
        by_rows: sums of segments of which each device can make those that it needs, from all operands.
        early: contributions to such sums, which have to be added up before: of a tied table, fewer bytes than behind.
    """

    state: Propagation
    of: dict[tuple[Node, int], Slice] = field(default_factory=dict)
    moved: dict[Node, int] = field(default_factory=dict)
    by_rows: dict[Value, Slice] = field(default_factory=dict)
    early: set[Value] = field(default_factory=set)

    def taken(self, value: Value) -> Slice | None:
        """Return the block that all readers take of a value; None where some take more, or others."""
        found: Slice | None = None
        for reader, index in value._uses:
            block = self._by(reader, index)
            if block is None or found not in (None, block):
                return None
            found = block
        return found

    def is_cut(self, node: Node, index: int, block: Slice) -> bool:
        """Return whether an operand costs nothing to cut: it is a constant or a variable, or another reader cuts it.

        Args:
            block: what it would take.
        """
        value = node.inputs[index]
        others = (use for use in value.uses if (use.node, use.index) != (node, index))
        return has(value.node.op, "weights") or any(self._by(*use) == block for use in others)

    def _by(self, reader: Node, index: int) -> Slice | None:
        if reader in self.moved:
            return self.of.get((reader, index))
        made = self.state.transfers.get(reader)
        want = None if made is None else made.operand_reshards.get(index)
        return want if isinstance(want, Slice) and not want.segments and want.halo is None else None


def block_reads(state: Propagation, units: int) -> BlockReads:
    """Find what is read in blocks only, and can be made in blocks.

    Args:
        state: the placements.
        units: that all blocks have together.
    """
    reads = BlockReads(state)
    anchored = set(state.graph.anchors.values())
    read = _read_in_blocks(state)
    for node in reversed(state.order):
        if node not in read:
            continue
        wanted = {value.index: reads.taken(value) for value in node.read_outputs}
        blocks = {index: block for index, block in wanted.items() if block is not None}
        if not blocks or len(blocks) < len(wanted):
            continue
        is_by_rows = node.op == SEGMENT_SUM and blocks[0] == Slice(0, (_rows(state, node) or 0) // units)
        if is_by_rows and [fact.placement.is_partial for fact in state.transfers[node].inputs] == [True, False, False]:
            reads.early.add(node.inputs[0])
        if not _may_be_cut(state, node) or not anchored.isdisjoint(node.outputs):
            continue
        if is_by_rows:
            reads.by_rows[node.output()] = blocks[0]
            continue
        for index, taken in _ways(reads, node, units, blocks):
            reads.moved[node] = index
            reads.of |= {(node, i): block for i, block in taken.items()}
            read.update(node.inputs[i].node for i in taken)
            break
    return reads


def _read_in_blocks(state: Propagation) -> set[Node]:
    """Return the nodes of which some reader takes a block."""
    return {
        node.inputs[index].node
        for node, made in state.transfers.items()
        if made.operand_reshards
        for index, want in made.operand_reshards.items()
        if isinstance(want, Slice)
    }


def _rows(state: Propagation, node: Node) -> int | None:
    """Return how many rows a sum of segments has, None where it is not known."""
    shape = state.facts[node.output()].shape
    return shape[0] if shape and isinstance(shape[0], int) else None


def cut_operands(reads: BlockReads, follow: Container[Node]) -> dict[Value, int]:
    """Add copies of the operands that have to be cut, and are not made in blocks; return them with the dimension.

    Args:
        reads: of the graph, which is edited.
        follow: handles of variables that will be cut, of which what is read needs no copy.
    """
    copies: dict[tuple[Value, Slice], Value] = {}
    for node, index in reads.moved.items():
        value, block = node.inputs[index], reads.of[node, index]
        source, made = value.node, value.node in reads.moved or value in reads.by_rows
        if made or (has(source.op, "reads_whole") and handle_node(source.inputs[0]) in follow):
            continue
        if (value, block) not in copies:
            graph = reads.state.graph
            copy = graph.add("Identity", [value], name=f"{value.node.name}/in_blocks", origin=value.node)
            copy.set_raw_attr(WHOLE, encode("bool", True))
            copies[value, block] = copy.output()
        node.set_input(index, copies[value, block])
    return {copy: block.dim for (_, block), copy in copies.items()}


def _may_be_cut(state: Propagation, node: Node) -> bool:
    """Return whether a node computes whole values of whole values, and may as well do so in several places."""
    made = state.transfers.get(node)
    if made is None or not node.inputs or has(node.op, "weights") or node in state.looped or node.attr(WHOLE, False):
        return False
    if (
        rule_of(node.op) is None
        or node.op in EXITS
        or is_pinned(node)
        or any(is_handle(value) for value in (*node.inputs, *node.outputs))
    ):
        return False
    facts = (*made.inputs, *made.outputs)
    return not any(fact.placement.differs or fact.dtype == dtypes.VARIANT for fact in facts)  # no op cuts a list


def _ways(
    reads: BlockReads, node: Node, units: int, wanted: Mapping[int, Slice]
) -> Iterator[tuple[int, dict[int, Slice]]]:
    """Yield the operands of which a block makes the node's results the blocks that are wanted, with all blocks read."""
    state = reads.state
    facts = state.transfers[node].inputs
    for index, fact in enumerate(facts):
        for dim, size in enumerate(fact.shape or ()):
            if not isinstance(size, int) or size < units or size % units:
                continue
            block = Slice(dim, size // units)
            inputs = tuple(
                convert(one, block, state.semantics.extent.units) if i == index else one for i, one in enumerate(facts)
            )
            made = answer_of(node, inputs, {}, state.semantics)
            if made.decompose or not all(_is(made.outputs[i], one) for i, one in wanted.items()):
                continue
            others = made.operand_reshards
            if not all(isinstance(want, (Slice, LocalEntry)) for want in others.values()):
                continue
            taken = {index: block} | {i: want for i, want in others.items() if isinstance(want, Slice)}
            if _is_worth_it(reads, node, taken, wanted):
                yield index, taken


def _is(fact: Fact, block: Slice) -> bool:
    return fact.placement == split(block.dim) and unit(fact.split_size) == block.unit


def _is_worth_it(reads: BlockReads, node: Node, taken: Mapping[int, Slice], wanted: Mapping[int, Slice]) -> bool:
    """Return whether no more bytes are cut than before, or a contraction is divided."""
    rule = rule_of(node.op)
    if rule is not None and rule.family in _CONTRACTIONS:
        return True
    facts = reads.state.facts
    before = [facts[node.output(index)] for index in wanted]
    after = [facts[node.inputs[index]] for index, block in taken.items() if not reads.is_cut(node, index, block)]
    return sum(map(_bytes, after)) <= sum(map(_bytes, before))


def _bytes(fact: Fact) -> int:
    return math.prod(size_of(dim) for dim in fact.shape or (None,)) * dtypes.width(fact.dtype)
