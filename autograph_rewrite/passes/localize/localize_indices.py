"""Make row indices relative to the local block, where each example indexes rows of itself only.

    before   rows [B*T, d];  GatherV2(rows, positions + [0, T, 2 T, ...])     numbers of rows of the whole batch
    after    rows [b*T, d];  GatherV2(rows, positions + [0, T, ... of b])     numbers of rows of the block

    before   UnsortedSegmentSum(slopes, positions + [0, T, ...], B*T)         the gradient of the same
    after    the same, of the block; so with ScatterNd, as in the gradient of the largest of each example

It holds where each position lies within its example. Only the run can tell: `CheckNumerics` fails where one does not,
on every kind of device. So this is done where the other way is that all micro-batches meet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import split
from autograph_rewrite.ops.facts.symbolic_dims import BLOCK, Dim, Sym, divide, times, to_global
from autograph_rewrite.ops.rules.marked import LOCAL_INDICES, mark
from autograph_rewrite.ops.traits import has, operands
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite

EXAMPLES = Sym(1, (BLOCK,))
OUTSIDE = (
    "a position lies outside of its own example, so it names a row of another one, perhaps in another micro-batch: "
    "leave microbatches and pipeline out where that is meant"
)


class Numbers(NamedTuple):
    """Numbers of rows: a position in each example, and where the example begins.

    Attributes:
        sum: the node that adds both.
        positions: of which input 0 of `sum` or 1 is this.
        stride: rows of an example, as a value; None where it is stated.
        rows: the same as a size.
    """

    sum: Node
    positions: Value
    stride: Value | None
    rows: Dim


def localize_indices(graph: Graph, state: Propagation) -> Propagation:
    """Rewrite the look-ups that stay within an example; return placements as they are then.

    Args:
        graph: the graph of `state`, to be edited.
    """
    made: dict[Value, Value] = {}
    found = 0
    for node in state.order:
        if node in state.looped or not _may_stay(state, node):
            continue
        (at,) = operands(node.op, "indexed_by")
        numbers = _numbers(state, node.inputs[at])
        if numbers is None or not _fits(state, node, numbers):
            continue
        node.set_input(at, _of_block(graph, state, node.inputs[at], numbers, made))
        if has(node.op, "adds_rows"):
            node.set_input(2, _rows_of_block(node, made[numbers.sum.output()]))
        mark((node,), LOCAL_INDICES)
        found += 1
    return revise(state) if found else state


def _may_stay(state: Propagation, node: Node) -> bool:
    """Return whether a node looks up, or adds up, rows by their numbers in the first dimension."""
    if has(node.op, "gathers"):
        axis = state.facts[node.inputs[2]].value if node.op == "GatherV2" else (0,)
        return axis == (0,) and not node.attr("batch_dims", 0)
    if node.op == "ScatterNd":
        indices, shape = state.facts[node.inputs[0]].shape, state.facts[node.inputs[2]].value
        return indices is not None and indices[-1:] == (1,) and shape is not None and len(shape) == 1
    return node.op == "UnsortedSegmentSum"


def _fits(state: Propagation, node: Node, numbers: Numbers) -> bool:
    """Return whether the rows that are numbered are those of the examples."""
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
    """Return what numbers of rows are made of; None where they are not understood."""
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
    """Return what `[0, T, 2 T, ...]` of the whole batch counts by."""
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
    """Return by what `Range(0, B*T, T)` counts, where T is stated."""
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


def _of_block(graph: Graph, state: Propagation, value: Value, numbers: Numbers, made: dict[Value, Value]) -> Value:
    """Return numbers of rows as they are in the block."""
    if value in made:
        return made[value]
    if value.node is numbers.sum:
        made[value] = _counted(state, numbers)
        return made[value]
    node = value.node
    inner = _of_block(graph, state, node.inputs[0], numbers, made)
    attrs = {
        key: node.attr(key) for key in ("T", "Tshape", "Tdim", "DstT", "SrcT", "squeeze_dims") if key in node.attrs
    }
    copy = Builder.at(node).node(node.op, inner, *node.inputs[1:], what="own", **attrs)
    made[value] = copy.output()
    return made[value]


def _rows_of_block(node: Node, own: Value) -> Value:
    """Return how many rows a block has: of each example of its numbers; as a vector where that is a shape."""
    begins = own.node.inputs[1].node.inputs[0].node  # of each example: the number times the rows of one
    numbered, rows = begins.inputs
    build = Builder.at(node)
    count = build.op("Mul", numbered.node.inputs[1], rows, what="rows_of_block")
    count = build.cast(count, node.inputs[2].dtype, "rows_of_block_as_size")
    return build.op("Pack", count, what="rows_of_block_as_shape", N=1, axis=0) if node.op == "ScatterNd" else count


def _counted(state: Propagation, numbers: Numbers) -> Value:
    """Return positions, checked, and the rows before their example in the block, added up."""
    positions, origin, dtype = numbers.positions, numbers.sum, numbers.positions.dtype
    kind, build = dtypes.numpy_dtype(dtype), Builder.at(origin)

    def const(content: Any, what: str, of: Any = kind) -> Value:
        return build.const(np.asarray(content, of), what=what)

    stride = numbers.stride
    rows = const(numbers.rows, "rows") if stride is None else stride
    rows = build.cast(rows, dtype, "rows_as_numbers")
    not_before = build.op("GreaterEqual", positions, const(0, "first"), what="not_before")
    not_behind = build.op("Less", positions, rows, what="not_behind")
    inside = build.op("LogicalAnd", not_before, not_behind, what="inside")
    numbers_of_fault = const(0, "fine", np.float32), const(np.nan, "outside", np.float32)
    fault = build.op("SelectV2", inside, *numbers_of_fault, what="fault")
    checked = build.op("CheckNumerics", fault, what="checked", message=OUTSIDE.encode())
    nothing = build.op("Cast", checked, what="nothing", DstT=dtype)
    shape = build.op("Shape", positions, what="shape", out_type=dtype)
    ends = [const([at], what, np.int32) for at, what in ((0, "at"), (1, "behind"), (1, "step"))]
    count = build.op("StridedSlice", shape, *ends, what="examples", shrink_axis_mask=1)
    numbered = build.node("Range", const(0, "start"), count, const(1, "delta"), what="numbered")
    mark((numbered,), LOCAL_INDICES)
    begins = build.op("Mul", numbered.output(), rows, what="begins")
    rank = state.facts[positions].rank or 1
    column = build.op("Reshape", begins, const([-1] + [1] * (rank - 1), "as_column", np.int32), what="column")
    return build.op("AddV2", build.op("AddV2", positions, nothing, what="own_positions"), column, what="own")


def _run(rewrite: Rewrite) -> None:
    """Make row indices relative to the local block instead of to the global batch."""
    rewrite.put(localize_indices(rewrite.graph, rewrite.get(Propagation)))


LOCALIZE_INDICES = Pass(
    "localize-indices", _run, lambda rewrite: rewrite.plan.microbatches > 1, (Propagation,), (Propagation,)
)
