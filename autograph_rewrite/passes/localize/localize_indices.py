"""Make row indices relative to the local block, where each example indexes rows of itself only.

    before   rows [B*T, d];  GatherV2(rows, positions + [0, T, 2 T, ...])     numbers of rows of the whole batch
    after    rows [b*T, d];  GatherV2(rows, positions + [0, T, ... of b])     numbers of rows of the block

    before   UnsortedSegmentSum(slopes, positions + [0, T, ...], B*T)         the gradient of the same
    after    the same, of the block; so with ScatterNd, as in the gradient of the largest of each example

This is right if each position is within its example. Only a run can tell: `CheckNumerics` fails otherwise, on every
kind of device. So the pass runs only with micro-batches, which would have to wait for each other without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.traversal import reachable, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import BLOCK, Dim, Sym, divide, is_segmented, times, to_global
from autograph_rewrite.ops.rules.marked import LOCAL_INDICES, MARK, ROWS_APART, keep_in_block
from autograph_rewrite.ops.traits import has, operands
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite

EXAMPLES = Sym(1, (BLOCK,))
OUTSIDE = (
    "a position lies outside of its own example, so it names a row of another one, perhaps in another micro-batch: "
    "leave microbatches and pipeline out where that is meant"
)


class Numbers(NamedTuple):
    """Row indices: a position in each example, plus the first row of the example.

    Attributes:
        sum: the node that adds both.
        positions: one of the two inputs of `sum`.
        stride: rows of an example, as a value; None if `rows` is a constant.
        rows: the same as a size.
    """

    sum: Node
    positions: Value
    stride: Value | None
    rows: Dim


def _localize_indices(rewrite: Rewrite) -> None:
    """Make row indices of look-ups that stay within an example relative to the local block, not the global batch."""
    state, made = rewrite.state, dict[Value, Value]()
    found = 0
    for node in state.order:
        if node in state.looped or not _may_stay(state, node):
            continue
        (at,) = operands(node.op, "indexed_by")
        numbers = _numbers(state, node.inputs[at])
        if numbers is None or not _fits(state, node, numbers):
            continue
        node.set_input(at, _of_block(state, node.inputs[at], numbers, made))
        if has(node.op, "adds_rows"):
            node.set_input(2, _rows_of_block(node, made[numbers.sum.output()]))
        keep_in_block((node,), LOCAL_INDICES)
        found += 1
    if found:
        rewrite.put(revise(state))


def _may_stay(state: Propagation, node: Node) -> bool:
    """Return whether a node looks up, or adds up, rows by their index in the first dimension."""
    if has(node.op, "gathers"):
        axis = state.facts[node.inputs[2]].value if node.op == "GatherV2" else (0,)
        return axis == (0,) and not node.attr("batch_dims", 0)
    if node.op == "ScatterNd":
        indices, shape = state.facts[node.inputs[0]].shape, state.facts[node.inputs[2]].value
        return indices is not None and indices[-1:] == (1,) and shape is not None and len(shape) == 1
    return node.op == "UnsortedSegmentSum"


def _fits(state: Propagation, node: Node, numbers: Numbers) -> bool:
    """Return whether the indexed rows are those of the examples."""
    rows = times(numbers.rows, EXAMPLES)
    (at,) = operands(node.op, "indexed_by")
    first = state.facts[node.inputs[1 - at]]
    if rows is None or first.placement != split(0):
        return False
    if has(node.op, "adds_rows"):
        ids, count = state.facts[node.inputs[at]], state.facts[node.inputs[2]].value
        fits = count in ((rows,), (to_global(rows, state.semantics.extent.units),))
        return fits and ids.placement == split(0) and ids.split_size == first.split_size
    return first.split_size == rows


def _numbers(state: Propagation, value: Value) -> Numbers | None:
    """Return the parts of row indices; None if their computation is not recognised."""
    node = value.node
    while has(node.op, "copies") and state.facts[node.inputs[0]].placement == split(0):
        node = node.inputs[0].node
    if not has(node.op, "adds") or state.facts[node.output()].placement != split(0):
        return None
    for positions, begins in (tuple(node.inputs), tuple(reversed(node.inputs))):
        fact, other = state.facts[positions], state.facts[begins]
        if fact.placement != split(0) or fact.split_size != EXAMPLES or not fact.rank:
            continue
        everything = to_global(EXAMPLES, state.semantics.extent.units)
        if other.shape is None or other.shape != (everything, *[1] * (fact.rank - 1)):
            continue
        stride = _stride(state, begins)
        if stride is not None:
            return Numbers(node, positions, *stride)
    return None


def _stride(state: Propagation, begins: Value) -> tuple[Value | None, Dim] | None:
    """Return the stride T of `[0, T, 2 T, ...]` over the whole batch; None if it is not recognised."""
    node = begins.node
    while has(node.op, "copies"):
        node = node.inputs[0].node
    if node.op == "Const":
        return _stride_of_constant(node, state.semantics.extent.units)
    if node.op == "Range":
        return _stride_of_range(state, node)
    if node.op != "Mul":
        return None
    for counted, stride in (tuple(node.inputs), tuple(reversed(node.inputs))):
        while has(counted.node.op, "copies"):
            counted = counted.node.inputs[0]
        known = state.facts[stride]
        if counted.node.op == "Range" and _counts_examples(state, counted.node) and known.value and known.rank == 0:
            return (stride, known.value[0]) if known.value[0] is not None else None
    return None


def _stride_of_range(state: Propagation, node: Node) -> tuple[None, int] | None:
    """Return the stride T of `Range(0, B*T, T)`, if T is a constant."""
    start, limit, step = (state.facts[value].value for value in node.inputs)
    if start != (0,) or limit is None or step is None or not isinstance(step[0], int) or step[0] < 1:
        return None
    examples = divide(limit[0], step[0])
    return (None, step[0]) if examples in (EXAMPLES, to_global(EXAMPLES, state.semantics.extent.units)) else None


def _stride_of_constant(node: Node, batch: int | None) -> tuple[None, int] | None:
    content = np.ravel(node.attr("value"))
    if batch is None or batch < 2 or content.size != batch or content.dtype.kind not in "iu":
        return None
    stride = int(content[1])
    return (None, stride) if stride > 0 and np.array_equal(content, np.arange(batch) * stride) else None


def _counts_examples(state: Propagation, node: Node) -> bool:
    """Return whether a Range counts the examples of the batch."""
    start, limit, step = (state.facts[value].value for value in node.inputs)
    everything = to_global(EXAMPLES, state.semantics.extent.units)
    return start == (0,) and step == (1,) and limit in ((EXAMPLES,), (everything,))


def _of_block(state: Propagation, value: Value, numbers: Numbers, made: dict[Value, Value]) -> Value:
    """Return row indices relative to the block."""
    if value in made:
        return made[value]
    if value.node is numbers.sum:
        made[value] = _counted(state, numbers)
        return made[value]
    node = value.node
    inner = _of_block(state, node.inputs[0], numbers, made)
    kept = ("T", "Tshape", "Tdim", "DstT", "SrcT", "squeeze_dims")
    attrs = {key: node.attr(key) for key in kept if key in node.attrs}
    made[value] = Builder.at(node).op(node.op, inner, *node.inputs[1:], what="own", **attrs)
    return made[value]


def _rows_of_block(node: Node, own: Value) -> Value:
    """Return the number of rows of a block, as a vector if the node reads a shape."""
    begins = own.node.inputs[1].node.inputs[0].node  # the number of each example times the rows of an example
    numbered, rows = begins.inputs
    build = Builder.at(node)
    count = build.op("Mul", numbered.node.inputs[1], rows, what="rows_of_block")
    count = build.cast(count, node.inputs[2].dtype, "rows_of_block_as_size")
    return build.op("Pack", count, what="rows_of_block_as_shape", N=1, axis=0) if node.op == "ScatterNd" else count


def _counted(state: Propagation, numbers: Numbers) -> Value:
    """Return the checked positions plus the number of rows before their example in the block."""
    positions, origin, dtype = numbers.positions, numbers.sum, numbers.positions.dtype
    kind, build = dtypes.numpy_dtype(dtype), Builder.at(origin)

    def const(content: Any, what: str, of: Any = kind) -> Value:
        return build.const(np.asarray(content, of), what=what)

    rows = const(numbers.rows, "rows") if numbers.stride is None else numbers.stride
    rows = build.cast(rows, dtype, "rows_as_numbers")
    not_before = build.op("GreaterEqual", positions, const(0, "first"), what="not_before")
    not_behind = build.op("Less", positions, rows, what="not_behind")
    inside = build.op("LogicalAnd", not_before, not_behind, what="inside")
    fine, outside = const(0, "fine", np.float32), const(np.nan, "outside", np.float32)
    fault = build.op("SelectV2", inside, fine, outside, what="fault")
    checked = build.op("CheckNumerics", fault, what="checked", message=OUTSIDE.encode())
    nothing = build.op("Cast", checked, what="nothing", DstT=dtype)
    shape = build.op("Shape", positions, what="shape", out_type=dtype)
    ends = [const([at], what, np.int32) for at, what in ((0, "at"), (1, "behind"), (1, "step"))]
    count = build.op("StridedSlice", shape, *ends, what="examples", shrink_axis_mask=1)
    numbered = build.op("Range", const(0, "start"), count, const(1, "delta"), what="numbered")
    keep_in_block((numbered.node,), LOCAL_INDICES)
    begins = build.op("Mul", numbered, rows, what="begins")
    rank = state.facts[positions].rank or 1
    column = build.op("Reshape", begins, const([-1] + [1] * (rank - 1), "as_column", np.int32), what="column")
    return build.op("AddV2", build.op("AddV2", positions, nothing, what="own_positions"), column, what="own")


def _has_micro_batches(rewrite: Rewrite) -> bool:
    return rewrite.plan.microbatches > 1


LOCALIZE_INDICES = Pass("localize-indices", _localize_indices, _has_micro_batches, (Propagation,), (Propagation,))


# Make indices of rows that a mask keeps relative to the local block, where they index blocks of the same rows only.
#
#     before   Where(mask) ──► Gather(rows)           numbers of rows of the whole batch, so that all of it is read
#     after    Where(block) ──► Gather(block)         numbers of rows of the block, which keeps its own
#
# The gradient, which puts rows back in their places, does the same. A mask decides on each row by itself, so nothing
# is checked at run time. Interleaved micro-batches cannot restore the batch order of kept rows: if a node reads all of
# them in that order, indices stay those of the whole batch.


def _localize_kept_rows(rewrite: Rewrite) -> None:
    """Make indices of rows that a mask keeps relative to the local block, not the global batch."""
    graph, state, ordered = rewrite.graph, rewrite.state, not rewrite.plan.interleaved
    found = {node: ends for node in state.order if (ends := _ends(graph, state, node))}
    found = _without_repeats(graph, found)
    for mask, ends in found.items():
        for end in ends:
            _count_rows_of_block(mask, end)
        keep_in_block((mask, *ends), LOCAL_INDICES)
    if found:
        state = revise(state)
    while lost := [mask for mask, ends in found.items() if not _is_local(state, mask, ends, ordered=ordered)]:
        for mask in lost:
            keep_in_block((mask, *found.pop(mask)), "")
        state = revise(state)
    rewrite.put(state)


def _without_repeats(graph: Graph, found: dict[Node, tuple[Node, ...]]) -> dict[Node, tuple[Node, ...]]:
    """Let repeated uses of a mask share one Where, so that propagation sees that they keep the same rows."""
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
    """Return whether all look-ups by a mask stay within blocks, and no reader needs an order that is lost.

    Args:
        ordered: whether concatenated blocks are in the order of the batch.
    """
    if any(state.transfers[node].decompose for node in (mask, *ends)):
        return False
    size = state.facts[mask.output()].split_size
    if ordered or not isinstance(size, Sym):
        return True
    kept = {value for value, fact in state.facts.items() if _measures(fact, size)}
    if any(value in kept for value in mask.graph.anchors.values()):
        return False
    return not any(
        node.inputs[i] in kept and reshard != state.facts[node.inputs[i]].placement
        for node, transferred in state.transfers.items()
        for i, reshard in transferred.operand_reshards.items()
    )


def _measures(fact: Fact, size: Sym) -> bool:
    """Return whether a value is split along the rows that a mask keeps."""
    mine = fact.split_size if fact.placement.is_split else None
    return isinstance(mine, Sym) and not set(size.factors).isdisjoint(mine.factors)


def _ends(graph: Graph, state: Propagation, node: Node) -> tuple[Node, ...]:
    """Return the nodes that look up rows by a mask; none if one of them may look into another block."""
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
    """Yield the readers of row indices, or of copies of them; None for an output."""
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

    The rows need not be in blocks yet: the gradient of a value that was joined is whole.
    """
    node = use.node
    if node in state.looped or operands(node.op, "indexed_by") != (use.index,) or MARK in node.attrs:
        return False
    everything = to_global(rows, state.semantics.extent.units)
    depth = (state.facts[node.inputs[use.index]].shape or (None,))[-1]
    if node.op in ("GatherNd", "ScatterNd") and depth != 1:  # more than a row index
        return False
    if has(node.op, "adds_rows"):
        count = state.facts[node.inputs[2]].value
        return count is not None and count[:1] in ((rows,), (everything,))
    if node.op == "GatherV2" and (state.facts[node.inputs[2]].value != (0,) or node.attr("batch_dims", 0)):
        return False
    table = state.facts[node.inputs[0]].shape
    return table is not None and table[:1] in ((rows,), (everything,))


def _count_rows_of_block(mask: Node, node: Node) -> None:
    """Let a node that puts rows back produce as many as the block of the mask has."""
    if not has(node.op, "adds_rows"):
        return
    given, build = node.inputs[2], Builder.at(node, "rows_of_block")
    rows = build.op("Shape", mask.inputs[0], out_type=given.dtype)
    ends = [build.const([at], dtypes.INT32, what) for at, what in ((0, "at"), (1, "behind"), (1, "step"))]
    if node.op == "UnsortedSegmentSum":
        node.set_input(2, build.op("StridedSlice", rows, *ends, what="first", shrink_axis_mask=1))
        return
    rest = build.op("StridedSlice", given, ends[1], ends[0], ends[2], what="rest", end_mask=1)
    node.set_input(2, build.op("ConcatV2", rows, rest, build.const(0, dtypes.INT32, "axis"), what="shape", N=2))


LOCALIZE_KEPT_ROWS = Pass("localize-kept-rows", _localize_kept_rows, _has_micro_batches, (Propagation,), (Propagation,))


# Mark pairs of ops that partition the rows of a batch and stitch them again, so that each replica runs them locally.
#
#     before   SparseToDense(SparseCross(a, b))                  dense a and b, of [rows, 1] each
#     after    the same two, marked; the second reads [rows of a, 1] instead of a size that a block without rows has not
#
#     before   RaggedTensorToTensor(f(words), row of each word) of StringSplitV2(texts), to a stated width
#     after    the same, marked; f works on each word by itself
#
# Row indices between the two count from the first row of the block, so all their readers must be known. If one is not,
# or if the width is that of the longest row of the batch, nothing is marked, and the ops work on whole values.


def mark_dynamic_partitions(graph: Graph) -> None:
    """Mark both ends of each complete chain."""
    ends = (node for node in graph if has(node.op, "crosses") or node.op == "StringSplitV2")
    starts = [node for node in ends if MARK not in node.attrs]
    looped = frames_of(topological_order(graph)) if starts else {}
    anchored = set(graph.anchors.values())
    for node in starts:
        # Nodes that are added in a loop would have to wait for its inputs in each iteration.
        if node in looped or any(node.output(i) in anchored for i in range(len(node.output_dtypes))):
            continue
        if has(node.op, "crosses"):
            _mark_cross(node)
        else:
            _mark_split(graph, node, anchored)


def _mark_cross(node: Node) -> None:
    """Mark a cross of dense columns: each row has as many features as there are combinations."""
    parameters = {"SparseCrossV2": 1, "SparseCrossHashed": 3}.get(node.op, 0)
    columns = node.inputs[: len(node.inputs) - parameters]
    shapes = [_shape(value) for value in columns]
    if node.attr("N") or not columns or any(shape is None or len(shape) != 2 for shape in shapes):
        return
    widths = [shape[1] for shape in shapes]
    readers = {use.node for i in range(3) for use in node.output(i).uses}
    ends = [reader for reader in readers if reader.op == "SparseToDense"]
    outputs = [node.output(i) for i in (0, 2, 1)]
    if not ends or len(ends) < len(readers) or None in widths:
        return
    if any(list(end.inputs[:3]) != outputs for end in ends):
        return
    for end in ends:
        rows, width = _rows(end, columns[0]), Builder.at(end).const(math.prod(widths), dtypes.INT64, "size")
        shape = Builder.at(end).op("Pack", rows, width, what="shape", N=2)
        end.set_input(1, shape)
    keep_in_block((node, *ends), ROWS_APART)


def _mark_split(graph: Graph, node: Node, anchored: set[Value]) -> None:
    """Mark a split into words that end in rows of a stated width, if only ops on single words are in between."""
    if len(_shape(node.inputs[0]) or ()) != 1:
        return
    ids = [use.node for use in node.output(0).uses]
    counts = [use.node for use in node.output(2).uses]
    if not all(_takes(reader, [0, 0], 2) for reader in ids) or not all(_takes(reader, [0], 1) for reader in counts):
        return
    ends = {use.node for reader in ids for use in reader.output().uses}
    words = _words(node.output(1), ends, anchored)
    rows, numbers = ({reader.output() for reader in readers} for readers in (ids, counts))
    if words is None or not ends or not anchored.isdisjoint(rows | numbers):
        return
    if not all(_is_end(end, words, rows, numbers) for end in ends):
        return
    if any(use.node not in ends for reader in counts for use in reader.output().uses):
        return
    for end in ends:
        end.set_input(3, _rows(end, node.inputs[0]))
    for reader in counts:
        if not reader.control_users:
            graph.erase(reader)
    keep_in_block((node, *ends), ROWS_APART)


def _words(first: Value, ends: set[Node], anchored: set[Value]) -> set[Value] | None:
    """Return the words and the values computed from each; None if another op reads them."""

    def made_of(value: Value) -> list[Value]:
        users = [use.node for use in value.uses] if _is_of(value, first) else []
        return [user.output() for user in users if user not in ends]

    found = set(reachable([first], made_of))
    return found if anchored.isdisjoint(found) and all(_is_of(value, first) for value in found) else None


def _is_of(value: Value, first: Value) -> bool:
    """Return whether a value is computed word by word from the words `first` alone."""
    if value is first:
        return True
    return has(value.node.op, "each_text") and all(_is_single(v) or _is_of(v, first) for v in value.node.inputs)


def _is_single(value: Value) -> bool:
    """Return whether a value is one constant for all words, or the handle of a table."""
    if dtypes.base(value.dtype) == dtypes.RESOURCE:
        return True
    content = _content(value)
    return content is not None and np.ndim(content) == 0


def _content(value: Value) -> Any:
    return value.node.attr("value") if value.node.op == "Const" else None


def _takes(node: Node, begin: list[int], rank: int) -> bool:
    """Return whether a slice takes the first column of a matrix, or the first entry of a vector."""
    if node.op != "StridedSlice" or node.attr("new_axis_mask") or node.attr("ellipsis_mask"):
        return False
    given, steps = _content(node.inputs[1]), _content(node.inputs[3])
    if given is None or steps is None or list(given) != begin or set(steps.tolist()) != {1}:
        return False
    if node.attr("shrink_axis_mask") != 1 << (rank - 1):
        return False
    return rank == 1 or bool(node.attr("begin_mask") & 1 and node.attr("end_mask") & 1)


def _is_end(node: Node, words: set[Value], ids: set[Value], counts: set[Value]) -> bool:
    """Return whether a node puts words into rows of a stated width."""
    if node.op != "RaggedTensorToTensor" or len(node.inputs) != 5:
        return False
    if [bytes(kind) for kind in node.attr("row_partition_types")] != [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]:
        return False
    shape, (values, default, count, rows) = _content(node.inputs[0]), node.inputs[1:]
    stated = shape is not None and np.shape(shape) == (2,) and shape[0] == -1 and shape[1] >= 0
    return bool(stated and values in words and _is_single(default) and count in counts and rows in ids)


def _shape(value: Value) -> Any:
    stated = value.node.attr("_output_shapes")
    return stated[value.index] if stated is not None and value.index < len(stated) else None


def _rows(end: Node, source: Value) -> Value:
    """Return the number of rows of a value, as an int64."""
    build = Builder.at(end)
    shape = build.op("Shape", source, what="rows_of", out_type=dtypes.INT64)
    limits = [build.const([at], dtypes.INT32, "size") for at in (0, 1, 1)]
    return build.op("StridedSlice", shape, *limits, what="rows", shrink_axis_mask=1)
