"""Segment sums: split rows with split ids give a partial table; whole ids make the rows whole too.

The second case is the de-duplication of a sparse gradient: its ids come from `Unique` over the whole
batch, and the update that follows reads whole rows anyway.
"""

from __future__ import annotations

from autograph_rewrite.analysis.fact import Shape
from autograph_rewrite.analysis.rules.base import Op, Placed, Rule, whole
from autograph_rewrite.analysis.rules.signature import (
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


def _rows_closed(n: Op) -> Signature | None:
    """Segments may reach across blocks: only the dimensions behind the first are open."""
    rank = n.rank(0)
    if not rank:
        return None
    labels = ("", *axes(rank - 1))
    return Signature((labels,) + (None,) * (len(n.inputs) - 1), (labels,), linear=_linear_in(n.op))


def _linear_in(op: str) -> tuple[int, ...]:
    return (0,) if "Sum" in op or "Mean" in op or "Sqrt" in op else ()


def _counts(n: Op) -> Signature | None:
    """Each row of a matrix is counted by itself."""
    if n.rank(0) != 2:
        return None
    weighted = n.rank(2) == 2 and n.op == "DenseBincount"
    weights: Labels | None = ("row", "") if weighted else None
    return Signature((("row", ""), None, weights), (("row", ""),))


def counts_shape(n: Op) -> tuple[Shape | None, ...]:
    """As many rows, and a column per value."""
    data, size = n.shape(0), n.value(1)
    if data is None or len(data) != 2:
        return shapes(n, None)
    return ((data[0], size[0] if size else (n.static[0] or (None, None))[1]),)


WHOLE = Rule(whole, lambda n: n.static)

RULES: dict[str, Rule] = {
    "UnsortedSegmentSum": Rule(place_unsorted_sum, unsorted_shape),
    **every(
        Rule(signed(_unsorted_other).place, unsorted_shape),
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
    ),
    **every(
        signed(_rows_closed),
        "SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd",
        "SegmentSumV2 SegmentMaxV2 SegmentMinV2 SegmentProdV2",
        "SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN",
        "SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments",
        "SparseSegmentSqrtNWithNumSegments",
        "SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad",
    ),
    "DenseBincount": Rule(signed(_counts).place, counts_shape),
    **every(WHOLE, "Bincount SparseBincount RaggedBincount"),
}
