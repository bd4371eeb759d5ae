"""Ops along one dimension (sorting, running sums, extremes) are free in all the others."""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.base import Op
from autograph_rewrite.ops.rules.factors import WHOLE, factors, lines
from autograph_rewrite.ops.rules.gather_scatter import axis_of
from autograph_rewrite.ops.rules.signature import Signature, axes, every, signed, without
from autograph_rewrite.ops.traits import has


def _along(n: Op) -> Signature | None:
    """All dimensions stay split except the one of the extreme or of the running result."""
    rank = n.rank(0)
    axis = None if not rank else axis_of(n, 1, rank)
    if rank is None or axis is None:
        return None
    labels = without(axes(rank), axis)
    result = labels[:axis] + labels[axis + 1 :] if has(n.op, "extremes") else labels
    return Signature((labels, None), (result,), linear=(0,) if n.op == "Cumsum" else ())


def top_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the operand's shape with `k` as last dimension."""
    shape = n.shape(0)
    if not shape:
        return n.static
    count: Dim = n.attr("k") if n.op == "TopK" else (n.value(1) or (None,))[0]
    return ((*shape[:-1], count),) * 2


def _reverse_sequence(n: Op) -> Signature | None:
    """All dimensions stay split except the one of the steps; lengths are split like their examples."""
    rank = n.rank(0)
    if not rank:
        return None
    steps, rows = n.attr("seq_dim") % rank, n.attr("batch_dim") % rank
    labels = without(axes(rank), steps)
    return Signature((labels, (labels[rows],)), (labels,), linear=(0,))


def unique_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return an index for each element of a vector; the number of distinct elements is not known."""
    stated = n.static
    return (stated[0], n.shape(0), *stated[2:]) if n.rank(0) == 1 else stated


RULES = {
    **every(WHOLE._replace(shape=unique_shape), "Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2"),
    **every(signed(_along), "ArgMax ArgMin Cumsum Cumprod CumulativeLogsumexp"),
    **every(factors("... -c -> ... -c, ... -c")._replace(shape=top_shape), "TopK TopKV2"),
    "ReverseSequence": signed(_reverse_sequence),
    # The results of the whole ops depend on all elements, or have a data-dependent number of rows.
    **lines("""
... -c, * -> ... : NthElement
n ., n . -> n . : LowerBound UpperBound
whole : Where ListDiff DynamicPartition DenseToDenseSetOperation DenseToSparseSetOperation
    SparseToSparseSetOperation EditDistance ApproxTopK
"""),
}
