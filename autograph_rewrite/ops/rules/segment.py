"""Segment sums: split rows with split ids give a partial table; replicated ids require replicated rows.

The second case de-duplicates a sparse gradient: its ids are results of `Unique` over the whole batch, and the
following update reads whole rows anyway. Counts and histograms are segment sums, too.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import PARTIAL, Placement, Shape
from autograph_rewrite.ops.facts.symbolic_dims import are_same, is_whole_of, to_global, unit
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, Slice, made_whole, others_whole, whole
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import axes, every


def _unsorted_sum(n: Op) -> str | None:
    """Rows split like their ids are summed over; dimensions after those of the ids stay split."""
    ids = None if n.rank(1) is None else " ".join(axes(n.rank(1) or 0, "id"))
    return None if ids is None else f"{ids} ..., {ids}, * -> . ... | {ids}"


def _unsorted_other(n: Op) -> str | None:
    """Only dimensions after those of the ids stay split."""
    ids = None if n.rank(1) is None else ". " * (n.rank(1) or 0)
    return None if ids is None else f"{ids} ..., {ids}, * -> . ..."


_UNSORTED_SUM, _UNSORTED_OTHER = factors(_unsorted_sum, linear=(0,)), factors(_unsorted_other)


def place_unsorted_sum(n: Op) -> Placed | None:
    """Sum rows split like their ids; rows whose ids are whole become whole."""
    data, ids = n.placement(0), n.inputs[1]
    rows_split = data.is_split and (ids.rank is None or data.dim < ids.rank)
    return whole(n) if rows_split and not ids.placement.differs else _UNSORTED_SUM.place(n)


def unsorted_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return a row per segment, with the data's dimensions after the ids."""
    data, id_rank, count = n.shape(0), n.rank(1), n.value(2)
    if data is None or id_rank is None:
        return n.static
    rows = count[0] if count else (n.static[0] or (None,))[0]
    return ((rows, *data[id_rank:]),)


def _rows_apart(n: Op) -> str | None:
    weights = "n ." if n.rank(2) == 2 else "*"
    return f"n ., *, {weights} -> n ." if n.rank(0) == 2 else None


_ROWS_APART = factors(_rows_apart)


def place_counts(n: Op) -> Placed | None:
    """Count each row of a matrix by itself; the counts of a vector's blocks are contributions."""
    return _ROWS_APART.place(n) if n.op == "DenseBincount" and n.rank(0) != 1 else _place_total(n)


def _place_total(n: Op) -> Placed:
    """Count split values: contributions to a sum, or for a binary output to a maximum."""
    values, weights, rows = n.placement(0), n.inputs[2], n.inputs[0].split_size
    operand_reshards = made_whole(n, 1)
    if not values.is_split:
        return whole(n)
    if weights.shape != (0,) and not (weights.placement == values and are_same(weights.split_size, rows)):
        unit_rows, batch = unit(rows), n.semantics.extent.units
        size = to_global(weights.shape[values.dim], batch) if weights.rank == n.rank(0) and weights.shape else None
        if unit_rows is None or not is_whole_of(size, rows, batch):  # weights may also be empty
            return whole(n)
        operand_reshards[2] = Slice(values.dim, unit_rows)
    binary = n.op == "DenseBincount" and n.attr("binary_output")
    return Placed((Placement("partial", op="max") if binary else PARTIAL,), operand_reshards)


def place_histogram(n: Op) -> Placed:
    """Count split values: contributions, as all blocks use one range."""
    return Placed((PARTIAL,), others_whole(n, 0)) if n.placement(0).is_split else whole(n)


def total_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return an entry per value, or per bin."""
    size = n.value(2 if n.op == "HistogramFixedWidth" else 1)
    return ((size[0],),) if size else n.static


def counts_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return a row for each row of the data, and a column per value."""
    data, size = n.shape(0), n.value(1)
    if data is not None and len(data) == 1:
        return total_shape(n)
    if data is None or len(data) != 2:
        return n.static
    return ((data[0], size[0] if size else (n.static[0] or (None, None))[1]),)


RULES: dict[str, Rule] = {
    "UnsortedSegmentSum": Rule(place_unsorted_sum, unsorted_shape),
    **every(
        _UNSORTED_OTHER._replace(shape=unsorted_shape), "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd"
    ),
    "DenseBincount": Rule(place_counts, counts_shape),
    "Bincount": Rule(place_counts, total_shape),
    "HistogramFixedWidth": Rule(place_histogram, total_shape),
    # Segments may span several blocks: only dimensions after the first can be split.
    **lines("""
. ... -> . ...; linear 0 : SegmentSum SegmentMean SegmentSumV2 SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN
    SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments
    SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad
. ... -> . ... : SegmentMax SegmentMin SegmentProd SegmentMaxV2 SegmentMinV2 SegmentProdV2
whole : SparseBincount RaggedBincount
"""),
}
