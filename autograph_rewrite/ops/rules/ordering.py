"""Ops along one dimension (sorting, running sums, extremes) are free in all the others."""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.gather_scatter import axis_of
from autograph_rewrite.ops.rules.signature import (
    Signature,
    axes,
    every,
    signed,
    without,
)


def _extreme(n: Op) -> Signature | None:
    """All dimensions but the reduced one stay split."""
    rank = n.rank(0)
    axis = None if not rank else axis_of(n, 1, rank)
    if rank is None or axis is None:
        return None
    labels = axes(rank)
    return Signature((without(labels, axis), None), (labels[:axis] + labels[axis + 1 :],))


def _running(n: Op) -> Signature | None:
    """All dimensions but that of the running result stay split."""
    rank = n.rank(0)
    axis = None if not rank else axis_of(n, 1, rank)
    if rank is None or axis is None:
        return None
    labels = without(axes(rank), axis)
    return Signature((labels, None), (labels,), linear=(0,) if n.op == "Cumsum" else ())


def _top(n: Op) -> Signature | None:
    """All but the last dimension stay split."""
    rank = n.rank(0)
    if not rank:
        return None
    labels = without(axes(rank), -1)
    return Signature((labels,) + (None,) * (len(n.inputs) - 1), (labels, labels))


def top_shape(n: Op) -> tuple[Shape | None, ...]:
    """The last dimension becomes `k`."""
    shape = n.shape(0)
    if not shape:
        return n.static
    count: Dim = n.attr("k") if n.op == "TopK" else (n.value(1) or (None,))[0]
    return ((*shape[:-1], count),) * 2


def _nth(n: Op) -> Signature | None:
    """All but the last dimension stay split."""
    rank = n.rank(0)
    if not rank:
        return None
    labels = axes(rank)
    return Signature((without(labels, -1), None), (labels[:-1],))


def _reverse_sequence(n: Op) -> Signature | None:
    """All dimensions but that of the steps stay split; lengths are cut like their examples."""
    rank = n.rank(0)
    if not rank:
        return None
    steps, rows = n.attr("seq_dim") % rank, n.attr("batch_dim") % rank
    labels = without(axes(rank), steps)
    return Signature((labels, (labels[rows],)), (labels,), linear=(0,))


WHOLE = Rule(whole, lambda n: n.static)

RULES: dict[str, Rule] = {
    **every(signed(_extreme), "ArgMax ArgMin"),
    **every(signed(_running), "Cumsum Cumprod CumulativeLogsumexp"),
    **every(Rule(signed(_top).place, top_shape), "TopK TopKV2"),
    "NthElement": signed(_nth),
    "ReverseSequence": signed(_reverse_sequence),
    **every(factors("n ., n . -> n ."), "LowerBound UpperBound"),
    # What comes out depends on all elements, or has as many rows as turn up.
    **every(
        WHOLE,
        "Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Where ListDiff",
        "DynamicPartition DenseToDenseSetOperation DenseToSparseSetOperation",
        "SparseToSparseSetOperation EditDistance ApproxTopK",
    ),
}
