"""Number the rows that a mask keeps within the local block, where they index blocks of the same rows only.

    before   Where(mask) ──► Gather(rows)           numbers of rows of the whole batch, so that all of it is read
    after    Where(block) ──► Gather(block)         numbers of rows of the block, which keeps its own

So does the gradient, which puts rows back where they were. A mask tells of each row by itself whether it is kept, so
nothing has to be checked in the run. Interleaved micro-batches cannot put kept rows in the order of the batch again:
where somebody reads all of them there, numbers stay those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym, is_segmented, to_global
from autograph_rewrite.ops.rules.marked import IN_BLOCK, LOCAL_INDICES, mark
from autograph_rewrite.ops.traits import has, operands
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


def localize_kept_rows(graph: Graph, state: Propagation, *, ordered: bool) -> Propagation:
    """Mark the masks whose rows stay in their block, and who looks up by them; return placements as they are then.

    Args:
        graph: the graph of `state`, to be edited.
        ordered: whether rows of blocks, one behind the other, are in the order of the batch.
    """
    found = {node: ends for node in state.order if (ends := _ends(graph, state, node))}
    found = _without_repeats(graph, found)
    for mask, ends in found.items():
        for end in ends:
            _count_rows_of_block(graph, mask, end)
        mark((mask, *ends), LOCAL_INDICES)
    if found:
        state = revise(state)
    while lost := [mask for mask, ends in found.items() if not _is_local(state, mask, ends, ordered=ordered)]:
        for mask in lost:
            mark((mask, *found.pop(mask)), b"")
        state = revise(state)
    return state


def _without_repeats(graph: Graph, found: dict[Node, tuple[Node, ...]]) -> dict[Node, tuple[Node, ...]]:
    """Let one mask that is applied several times be numbered once: then its rows are seen to be the same."""
    kept: dict[Value, Node] = {}
    merged: dict[Node, tuple[Node, ...]] = {}
    for node, ends in found.items():
        mask = node.inputs[0]
        while has(mask.node.op, "rearranges") or mask.node.op == "StopGradient":
            mask = mask.node.inputs[0]
        first = kept.setdefault(mask, node)
        merged[first] = tuple(dict.fromkeys((*merged.get(first, ()), *ends)))
        if first is not node:
            node.output().replace_all_uses_with(first.output())
            if not node.control_users:
                graph.erase(node)
    return merged


def _is_local(state: Propagation, mask: Node, ends: Iterable[Node], *, ordered: bool) -> bool:
    """Return whether all that look up by a mask do so in blocks, and nobody needs an order that is lost."""
    if any(state.transfers[node].decompose for node in (mask, *ends)):
        return False
    size = state.facts[mask.output()].split_size
    if ordered or not isinstance(size, Sym):
        return True
    kept = {value for value, fact in state.facts.items() if _is_of(fact, size)}
    if any(value in kept for value in mask.graph.anchors.values()):
        return False
    return not any(
        node.inputs[i] in kept and reshard != state.facts[node.inputs[i]].placement
        for node, transferred in state.transfers.items()
        for i, reshard in transferred.operand_reshards.items()
    )


def _is_of(fact: Fact, size: Sym) -> bool:
    """Return whether a value is cut along the rows that a mask keeps."""
    mine = fact.split_size if fact.placement.is_split else None
    return isinstance(mine, Sym) and not set(size.factors).isdisjoint(mine.factors)


def _ends(graph: Graph, state: Propagation, node: Node) -> tuple[Node, ...]:
    """Return who looks up by the numbers of a mask, and nothing where one of them may look into another block."""
    if node.op != "Where" or node in state.looped:
        return ()
    mask = state.facts[node.inputs[0]]
    rows = mask.split_size
    if mask.placement != split(0) or mask.rank != 1 or rows is None or is_segmented(rows):
        return ()
    anchored = set(graph.anchors.values())
    ends: dict[Node, None] = {}
    for use in _readers(node, anchored):
        if use is None or not _stays(state, use, rows):
            return ()
        ends[use.node] = None
    return tuple(ends)


def _readers(node: Node, anchored: set[Value]) -> Iterator[Use | None]:
    """Yield what reads numbers, or copies of them; None where the outside does."""
    pending = [node.output()]
    while pending:
        value = pending.pop()
        if value in anchored:
            yield None
        for use in value.uses:
            if has(use.node.op, "copies") and use.index == 0:
                pending.append(use.node.output())
            elif not has(use.node.op, "lengths"):
                yield use


def _stays(state: Propagation, use: Use, rows: Dim) -> bool:
    """Return whether a node looks up, or adds up, as many rows as the mask has.

    What is looked up need not be in blocks yet: a gradient of what was put together whole is not.
    """
    node = use.node
    if node in state.looped or operands(node.op, "indexed_by") != (use.index,) or IN_BLOCK in node.attrs:
        return False
    everything = to_global(rows, state.semantics.extent.units)
    depth = (state.facts[node.inputs[use.index]].shape or (None,))[-1]
    if node.op in ("GatherNd", "ScatterNd") and depth != 1:  # a number of a row, and nothing else
        return False
    if has(node.op, "adds_rows"):
        count = state.facts[node.inputs[2]].value
        return count is not None and count[:1] in ((rows,), (everything,))
    if node.op == "GatherV2" and (state.facts[node.inputs[2]].value != (0,) or node.attr("batch_dims", 0)):
        return False
    table = state.facts[node.inputs[0]].shape
    return table is not None and table[:1] in ((rows,), (everything,))


def _count_rows_of_block(graph: Graph, mask: Node, node: Node) -> None:
    """Let a node that puts rows back make as many as the block of the mask has."""
    if not has(node.op, "adds_rows"):
        return
    given, name = node.inputs[2], f"{node.name}/rows_of_block"

    def add(op: str, what: str, *inputs: Value, **attrs: Any) -> Value:
        return Builder(graph, f"{name}{what}", node).op(op, *inputs, **attrs)

    def const(content: object, what: str) -> Value:
        return Builder(graph, f"{name}{what}", node).const(content, dtypes.INT32)

    rows = add("Shape", "", mask.inputs[0], out_type=given.dtype)
    ends = [const([at], what) for at, what in ((0, "/at"), (1, "/behind"), (1, "/step"))]
    if node.op == "UnsortedSegmentSum":
        node.set_input(2, add("StridedSlice", "/first", rows, *ends, shrink_axis_mask=1))
        return
    rest = add("StridedSlice", "/rest", given, ends[1], ends[0], ends[2], end_mask=1)
    node.set_input(2, add("ConcatV2", "/shape", rows, rest, const(0, "/axis"), N=2))


def _run(rewrite: Rewrite) -> None:
    """Number the rows that a mask keeps within the local block instead of within the global batch."""
    rewrite.put(localize_kept_rows(rewrite.graph, rewrite.get(Propagation), ordered=not rewrite.plan.interleaved))


LOCALIZE_KEPT_ROWS = Pass(
    "localize-kept-rows", _run, lambda rewrite: rewrite.plan.microbatches > 1, (Propagation,), (Propagation,)
)
