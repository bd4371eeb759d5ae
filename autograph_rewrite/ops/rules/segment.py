"""Segment sums: split rows with split ids give a partial table; replicated ids require replicated rows.

The second case is the de-duplication of a sparse gradient: its ids come from `Unique` over the whole
batch, and the update that follows reads whole rows anyway. Counts and histograms are such sums, too.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Placement, Shape
from autograph_rewrite.ops.facts.symbolic_dims import are_same, is_whole_of, to_global, unit
from autograph_rewrite.ops.rules.base import Op, Placed, Reshard, Rule, Slice, others_whole, whole
from autograph_rewrite.ops.rules.factors import lines
from autograph_rewrite.ops.rules.signature import (
    Labels,
    Signature,
    axes,
    every,
    place,
    shapes,
    signed,
)


def _behind(n: Op) -> tuple[Labels, Labels] | None:
    """Return the labels of ids and of the dimensions of the data behind them."""
    rank, id_rank = n.rank(0), n.rank(1)
    if rank is None or id_rank is None or id_rank > rank:
        return None
    return axes(id_rank, "id"), axes(rank - id_rank)


def _unsorted_sum(n: Op) -> Signature | None:
    """Rows split like their ids are summed over; dimensions behind the ids stay split."""
    found = _behind(n)
    if found is None:
        return None
    ids, rest = found
    return Signature((ids + rest, ids, None), (("", *rest),), frozenset(ids), linear=(0,))


def _unsorted_other(n: Op) -> Signature | None:
    """Only dimensions behind the ids stay split."""
    found = _behind(n)
    if found is None:
        return None
    ids, rest = found
    closed = ("",) * len(ids)
    return Signature((closed + rest, closed, None), (("", *rest),))


def place_unsorted_sum(n: Op) -> Placed:
    """Sum rows split like their ids; rows whose ids are whole become whole."""
    data, ids = n.placement(0), n.inputs[1]
    rows_split = data.is_split and (ids.rank is None or data.dim < ids.rank)
    return whole(n) if rows_split and not ids.placement.differs else place(n, _unsorted_sum(n))


def unsorted_shape(n: Op) -> tuple[Shape | None, ...]:
    """A row per segment, shaped like the data behind the ids."""
    data, id_rank, count = n.shape(0), n.rank(1), n.value(2)
    if data is None or id_rank is None:
        return n.static
    rows = count[0] if count else (n.static[0] or (None,))[0]
    return ((rows, *data[id_rank:]),)


def place_counts(n: Op) -> Placed:
    """Count each row of a matrix by itself; the counts of a vector's blocks add up."""
    return place(n, _rows_apart(n)) if n.op == "DenseBincount" and n.rank(0) != 1 else _place_total(n)


def _place_total(n: Op) -> Placed:
    """Count what is split into contributions, or into what turns up at all."""
    values, weights, rows = n.placement(0), n.inputs[2], n.inputs[0].split_size
    operand_reshards: dict[int, Reshard] = {1: REPLICATED} if n.placement(1).differs else {}
    if not values.is_split:
        return whole(n)
    if weights.shape != (0,) and not (weights.placement == values and are_same(weights.split_size, rows)):
        unit_rows, batch = unit(rows), n.semantics.extent.units
        size = to_global(weights.shape[values.dim], batch) if weights.rank == n.rank(0) and weights.shape else None
        if unit_rows is None or not is_whole_of(size, rows, batch):  # it may be empty, too
            return whole(n)
        operand_reshards[2] = Slice(values.dim, unit_rows)
    binary = n.op == "DenseBincount" and n.attr("binary_output")
    return Placed((Placement("partial", op="max") if binary else PARTIAL,), operand_reshards)


def place_histogram(n: Op) -> Placed:
    """The counts of blocks add up, if all use the same range."""
    return Placed((PARTIAL,), others_whole(n, 0)) if n.placement(0).is_split else whole(n)


def total_shape(n: Op) -> tuple[Shape | None, ...]:
    """An entry per value, or per bin."""
    size = n.value(2 if n.op == "HistogramFixedWidth" else 1)
    return ((size[0],),) if size else n.static


def _rows_apart(n: Op) -> Signature | None:
    if n.rank(0) != 2:
        return None
    weighted = n.rank(2) == 2 and n.op == "DenseBincount"
    weights: Labels | None = ("row", "") if weighted else None
    return Signature((("row", ""), None, weights), (("row", ""),))


def counts_shape(n: Op) -> tuple[Shape | None, ...]:
    """As many rows, and a column per value."""
    data, size = n.shape(0), n.value(1)
    if data is not None and len(data) == 1:
        return total_shape(n)
    if data is None or len(data) != 2:
        return shapes(n, None)
    return ((data[0], size[0] if size else (n.static[0] or (None, None))[1]),)


RULES: dict[str, Rule] = {
    "UnsortedSegmentSum": Rule(place_unsorted_sum, unsorted_shape),
    **every(
        Rule(signed(_unsorted_other).place, unsorted_shape),
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
    ),
    "DenseBincount": Rule(place_counts, counts_shape),
    "Bincount": Rule(place_counts, total_shape),
    "HistogramFixedWidth": Rule(place_histogram, total_shape),
    # Segments may reach across blocks: only the dimensions behind the first are open.
    **lines("""
. ... -> . ...; linear 0 : SegmentSum SegmentMean SegmentSumV2 SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN
    SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments
    SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad
. ... -> . ... : SegmentMax SegmentMin SegmentProd SegmentMaxV2 SegmentMinV2 SegmentProdV2
whole : SparseBincount RaggedBincount
"""),
}
