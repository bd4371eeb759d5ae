"""Decompose ops that mix examples into ops whose partial results add up.

    before   Mean(x)                        over a split dimension
    after    Sum(x) / size(x)               the sum is partial, the size becomes global

    before   BroadcastGradientArgs(b T 8, b U 8)   U is T, or 1
    after    BroadcastGradientArgs(0 T 8, 0 U 8)   the same for every block and batch

    before   Sum(dy, axes of the run)       the gradient of a broadcast op, for an operand of open sizes
    after    Sum(dy, the same, keep_dims)   its rank is known; the Reshape behind it drops the dimensions

    before   ReverseV2(x) or Roll(x)        along the batch
    after    BroadcastTo(ReverseV2(x), shape(x))  the same values, of which each replica keeps its block

    before   FusedBatchNormV3(x, ...)       statistics of the whole batch
    after    Mean, SquaredDifference, Rsqrt, Mul, AddV2; its gradient likewise

    before   EnsureShape(x, [4, 6])         over a split dimension of 4
    after    Assert(shape(x)[0] == 4) ──► EnsureShape(x, [None, 6])

Only nodes that propagation asks for are changed. With `batch_norm: local` a fused batch normalisation keeps its op and
is marked, and its statistics are averaged over the replicas for all readers but its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import replace_outputs
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import variable_dependent_nodes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim, to_global
from autograph_rewrite.ops.rules.marked import ROWS_APART, STATISTICS, keep_in_block, make_whole, mark, why_in_block
from autograph_rewrite.ops.rules.sizes import rows_of_operands
from autograph_rewrite.ops.traits import ops_with
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite

SUMMED_AS = {
    **dict.fromkeys((dtypes.HALF, dtypes.BFLOAT16), dtypes.FLOAT),
    **dict.fromkeys((dtypes.INT8, dtypes.INT16), dtypes.INT64),
    **dict.fromkeys((dtypes.UINT8, dtypes.UINT16), dtypes.UINT64),
}
"""The type in which TensorFlow's kernel of a mean sums narrow numbers."""


def decompose_mean(node: Node, build: Builder) -> None:
    """Replace a Mean by Sum / number of elements, summed and, for integers, truncated as in TensorFlow's kernel."""
    x, axes = node.inputs
    dtype = x.dtype
    wide = SUMMED_AS.get(dtype, dtype)
    total = build.op("Sum", build.cast(x, wide, "widen"), axes, what="sum", keep_dims=bool(node.attr("keep_dims")))
    count = _count(build, x, axes, wide)
    divide = "TruncateDiv" if wide in dtypes.INTEGER else "RealDiv"
    result = build.cast(build.op(divide, total, count, what="mean"), dtype, "narrow")
    replace_outputs(node.graph, node, {0: result})


def _count(build: Builder, x: Value, axes: Value, dtype: int) -> Value:
    """Return the number of elements that are reduced; propagation makes it global."""
    # A mean accepts axes that are counted from the end; the gather of sizes does not.
    content = axes.node.attr("value") if axes.node.op == "Const" else None
    if not isinstance(content, np.ndarray) or (content < 0).any():
        rank = build.cast(build.op("Rank", x, what="rank"), axes.dtype, "rank_of_axes")
        axes = build.op("FloorMod", axes, rank, what="axes")
    shape, first = build.op("Shape", x, what="shape"), build.const(0, dtypes.INT32, "first")
    sizes = build.op("GatherV2", shape, axes, first, what="sizes")
    sizes = build.op("Reshape", sizes, build.const([-1], dtypes.INT32, "line"), what="reduced_sizes")
    count = build.op("Prod", sizes, build.const([0], dtypes.INT32, "all"), what="count", keep_dims=False)
    return build.cast(count, dtype, "count_as_number")


class _Normalisation:
    """The nodes and attributes that a batch normalisation and its gradient share."""

    def __init__(self, node: Node, build: Builder) -> None:
        self.build = build
        layout = node.attr("data_format").decode()
        channels_first = layout.startswith("NC")
        rank = len(layout)
        axes = [0, *range(2, rank)] if channels_first else list(range(rank - 1))
        self.spread = [1, -1, *[1] * (rank - 2)] if channels_first else None
        self.reduced = build.const(axes, dtypes.INT32, "axes")
        self.epsilon = node.attr("epsilon")

    def per_channel(self, value: Value, name: str) -> Value:
        """Bring a vector per channel into a shape that broadcasts over the images."""
        if self.spread is None:
            return value
        shape = self.build.const(self.spread, dtypes.INT32, f"{name}_shape")
        return self.build.op("Reshape", value, shape, what=f"{name}_spread")

    def inverse_deviation(self, variance: Value) -> Value:
        """Return 1 / sqrt(variance + epsilon)."""
        epsilon = self.build.const(self.epsilon, variance.dtype, "epsilon")
        shifted = self.build.op("AddV2", variance, epsilon, what="shifted")
        return self.build.op("Rsqrt", shifted, what="inverse_deviation")


def decompose_batch_norm(node: Node, build: Builder) -> None:
    """Replace batch normalisation in training by ops on means over the whole batch.

    Args:
        node: FusedBatchNorm, V2 or V3; x is [N, H, W, C] or [N, C, H, W], the others [C].
    """
    x, scale, offset, old_mean, old_variance = node.inputs
    norm, dtype = _Normalisation(node, build), scale.dtype
    wide = build.cast(x, dtype, "widen")
    mean = build.op("Mean", wide, norm.reduced, what="mean", keep_dims=False)
    centre = norm.per_channel(mean, "mean")
    spread = build.op("SquaredDifference", wide, centre, what="squared_difference")
    variance = build.op("Mean", spread, norm.reduced, what="variance", keep_dims=False)
    factor = build.op("Mul", norm.inverse_deviation(variance), scale, what="factor")
    centred = build.op("Sub", wide, centre, what="centred")
    scaled = build.op("Mul", centred, norm.per_channel(factor, "factor"), what="scaled")
    y = build.cast(build.op("AddV2", scaled, norm.per_channel(offset, "offset"), what="y"), x.dtype, "narrow")
    count = _count(build, x, norm.reduced, dtype)
    one = build.const(1, dtype, "one")
    less = build.op("Maximum", build.op("Sub", count, one, what="less"), one, what="Maximum")
    bessel = build.op("RealDiv", count, less, what="bessel")
    unbiased = build.op("Mul", variance, bessel, what="unbiased")
    rate = node.attr("exponential_avg_factor", 1.0)
    results = {
        0: y,
        1: _blend(build, old_mean, mean, rate, "mean"),
        2: _blend(build, old_variance, unbiased, rate, "variance"),
        3: mean,
        4: variance,
    }
    if len(node.output_dtypes) > 5:
        results[5] = build.const(np.zeros(0), dtype, "reserve")
    replace_outputs(node.graph, node, results)


def check_size(node: Node, build: Builder, dim: int, size: Dim) -> None:
    """Let an EnsureShape leave the split dimension open, and assert its size, which propagation makes global.

    Args:
        node: states a size of the split dimension.
        size: of that dimension in the whole value; if it is the stated one, no assertion is needed.
    """
    stated = node.attr("shape")
    node.set_attr("shape", (*stated[:dim], None, *stated[dim + 1 :]))
    wanted = stated[dim]
    if size == wanted:
        return
    (value,) = node.inputs
    limits = [build.const([at], dtypes.INT32, what) for at, what in ((dim, "dim"), (dim + 1, "behind"), (1, "step"))]
    shape = build.op("Shape", value, what="shape")
    found = build.op("StridedSlice", shape, *limits, what="size", shrink_axis_mask=1)
    fits = build.op("Equal", found, build.const(wanted, dtypes.INT32, "stated"), what="fits")
    text = f"'{node.name}' ensures that dimension {dim} of '{value.name}' has {wanted} rows; over all replicas it has"
    words = build.const(text.encode(), dtypes.STRING, "words")
    check = Builder.at(node).node("Assert", fits, words, found, what="check", T=(words.dtype, found.dtype))
    node.add_control(check)


def _blend(build: Builder, old: Value, new: Value, rate: float, name: str) -> Value:
    """Return old * (1 - rate) + new * rate."""
    if rate == 1.0:
        return new
    kept = build.op("Mul", old, build.const(1.0 - rate, old.dtype, f"{name}_kept"), what=f"{name}_old")
    added = build.op("Mul", new, build.const(rate, old.dtype, f"{name}_rate"), what=f"{name}_new")
    return build.op("AddV2", kept, added, what=f"running_{name}")


def decompose_batch_norm_gradient(node: Node, build: Builder) -> None:
    """Replace the gradient of batch normalisation in training; its sums over the batch are the parameters' gradients.

    Args:
        node: FusedBatchNormGrad, V2 or V3; dy and x have the images' shape, the others [C].
    """
    dy, x, scale, mean, variance, *_ = node.inputs
    norm, dtype = _Normalisation(node, build), scale.dtype
    wide_x, wide_dy = build.cast(x, dtype, "widen_x"), build.cast(dy, dtype, "widen_dy")
    inverse = norm.inverse_deviation(variance)
    centred = build.op("Sub", wide_x, norm.per_channel(mean, "mean"), what="centred")
    normal = build.op("Mul", centred, norm.per_channel(inverse, "inverse"), what="normal")
    product = build.op("Mul", wide_dy, normal, what="product")
    d_scale = build.op("Sum", product, norm.reduced, what="d_scale", keep_dims=False)
    d_offset = build.op("Sum", wide_dy, norm.reduced, what="d_offset", keep_dims=False)
    count = _count(build, x, norm.reduced, dtype)
    shift = norm.per_channel(build.op("RealDiv", d_offset, count, what="mean_d"), "shift")
    slope = norm.per_channel(build.op("RealDiv", d_scale, count, what="mean_product"), "slope")
    inner = build.op("Sub", wide_dy, shift, what="shifted")
    inner = build.op("Sub", inner, build.op("Mul", normal, slope, what="sloped"), what="inner")
    factor = norm.per_channel(build.op("Mul", inverse, scale, what="factor"), "factor")
    dx = build.cast(build.op("Mul", inner, factor, what="dx"), x.dtype, "narrow")
    empty = build.const(np.zeros(0), dtype, "reserve")
    replace_outputs(node.graph, node, {0: dx, 1: d_scale, 2: d_offset, 3: empty, 4: empty})


def keep_summed_dimensions(node: Node, build: Builder) -> None:
    """Keep the dimensions that the gradient of a broadcast op sums: only the run tells which, and so the rank was open.

    If only Reshapes read the sum, they remove the dimensions; otherwise the node runs whole.

    Args:
        build: unused; all decompositions take the same parameters.
    """
    readers = [(use.node.op, use.index) for use in node.output().uses]
    if all(reader == ("Reshape", 0) for reader in readers) and node.output() not in node.graph.anchors.values():
        node.set_attr("keep_dims", True)
    else:
        make_whole(node, "it is open which dimensions it sums")


def cut_again(node: Node, build: Builder) -> None:
    """Let an op that changes the order of examples work on all of them, and its readers on blocks."""
    moved = build.op(node.op, *node.inputs, what="moved")
    make_whole(moved.node, "it changes the order of examples")
    shape = build.op("Shape", node.inputs[0], what="shape", out_type=dtypes.INT32)
    replace_outputs(node.graph, node, {0: build.op("BroadcastTo", moved, shape, what="cut")})


def forget_rows(node: Node, build: Builder, facts: Mapping[Value, Fact]) -> None:
    """Let BroadcastGradientArgs see zero rows instead of a batch.

    The op also names dimensions that are 1 on both sides; a batch of one example has 0 rows in most blocks.
    """
    operands = [facts[value].value or () for value in node.inputs]
    for index, (value, rows) in enumerate(zip(node.inputs, rows_of_operands(*operands), strict=True)):
        if any(rows):
            rest = build.const([int(not is_row) for is_row in rows], value.dtype, f"no_rows_{index}")
            node.set_input(index, build.op("Mul", value, rest, what=f"without_rows_{index}"))


DECOMPOSITIONS: Mapping[str, Callable[[Node, Builder], None]] = {
    "Mean": decompose_mean,
    "Sum": keep_summed_dimensions,
    **dict.fromkeys(("ReverseV2", "Roll"), cut_again),
    **dict.fromkeys(ops_with("fused_batch_norms"), decompose_batch_norm),
    **dict.fromkeys(ops_with("fused_batch_norm_gradients"), decompose_batch_norm_gradient),
}


class Blocks(NamedTuple):
    """How the batch is divided.

    Attributes:
        instances: how many blocks there are.
        batch: the number of examples of the whole batch; None if it is not static.
        have_own_statistics: a batch normalisation of values that depend on a variable uses statistics of each block.
    """

    instances: int
    batch: int | None = None
    have_own_statistics: bool = False


def decompose(state: Propagation, nodes: Iterable[Node], blocks: Blocks) -> None:
    """Rewrite the nodes that propagation marked.

    Raises:
        PassError: an op has no decomposition.
    """
    graph, facts = state.graph, state.facts
    learnt = variable_dependent_nodes(graph) if blocks.have_own_statistics else ()
    for node in nodes:
        if why_in_block(node) == ROWS_APART:  # all nodes between these then work on whole values
            keep_in_block([end for end in graph if why_in_block(end) == ROWS_APART], "")
            continue
        # a constant of a loop must depend on its iterations
        build = Builder.at(node, tied=node.inputs[0].node if node in state.looped else None)
        if node.op == "EnsureShape":
            fact = facts[node.inputs[0]]
            check_size(node, build, fact.placement.dim, to_global(fact.split_size, blocks.batch))
            continue
        if blocks.have_own_statistics and node.op.startswith("FusedBatchNorm") and _normalised(node).node in learnt:
            _keep_block_statistics(node, blocks.instances, build)
            continue
        if node.op == "BroadcastGradientArgs":
            forget_rows(node, build, facts)
            continue
        rewrite = DECOMPOSITIONS.get(node.op)
        if rewrite is None:
            raise PassError(f"op {node.op} mixes examples and has no decomposition", node=node)
        rewrite(node, build)


def _normalised(node: Node) -> Value:
    """Return the values that a batch normalisation, or its gradient, normalises."""
    return node.inputs[1 if node.op.startswith("FusedBatchNormGrad") else 0]


def _keep_block_statistics(node: Node, replicas: int, build: Builder) -> None:
    """Mark a batch normalisation as local, and average its statistics for moving averages."""
    mark(node, STATISTICS)
    if node.op.startswith("FusedBatchNormGrad"):
        return
    for index in (1, 2):
        value = node.output(index)
        readers = [use.node for use in value.uses if not use.node.op.startswith("FusedBatchNormGrad")]
        if readers:
            share = build.const(1.0 / replicas, value.dtype, f"share_{index}")
            average = build.op("Mul", value, share, what=f"average_{index}")
            gradients = {use.node for use in value.uses} - set(readers)
            value.replace_all_uses_with(average, keep={average.node, *gradients})


MAX_DECOMPOSITIONS = 8
"""Rounds: a decomposition may add ops that mix examples, as a batch normalisation adds means."""


def _run(rewrite: Rewrite) -> None:
    """Turn ops that mix examples (mean, batch norm...) into sums that add up."""
    for _ in range(MAX_DECOMPOSITIONS):
        state, marked = rewrite.get(Propagation), _marked(rewrite)
        if not marked:
            return
        own = rewrite.plan.semantics.batch_norm == "local"
        blocks = Blocks(rewrite.plan.instances, state.semantics.extent.units, own)
        decompose(state, marked, blocks)
        rewrite.put(revise(state))
    if marked := _marked(rewrite):
        raise PassError(f"op {marked[0].op} still mixes examples after it was decomposed", node=marked[0])


def _marked(rewrite: Rewrite) -> list[Node]:
    """Return the nodes that mix examples."""
    return [node for node, transferred in rewrite.get(Propagation).transfers.items() if transferred.decompose]


DECOMPOSE = Pass("decompose", _run, lambda rewrite: bool(_marked(rewrite)), (Propagation,), (Propagation,))
