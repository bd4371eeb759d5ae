"""Ops that stack, concatenate or cut values: they work on blocks along other dimensions than the split one.

A concatenation along the split dimension makes the blocks segments of one block; a cut between segments undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from autograph_rewrite.ops.facts.placement import REPLICATED, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import (
    Dim,
    are_same,
    between_seams,
    joined,
    parts,
    rows_per_example,
    to_global,
    unit,
)
from autograph_rewrite.ops.rules.base import Op, Placed, Reshard, Rule, Values, block_of, whole
from autograph_rewrite.ops.rules.kernels import add, array, by_kernel, flat
from autograph_rewrite.ops.rules.layout import join_pieces


def place_pack(n: Op) -> Placed:
    """Stack: the new dimension is inserted before or after the split one."""
    found = join_pieces(n, range(len(n.inputs)))
    if found is None:
        return whole(n)
    placement, operand_reshards = found
    if not placement.is_split:
        return Placed((placement,), operand_reshards)
    axis = n.attr("axis") % ((n.rank(0) or 0) + 1)
    return Placed((split(placement.dim + (axis <= placement.dim)),), operand_reshards)


def shape_pack(n: Op) -> tuple[Shape | None, ...]:
    """Insert the number of pieces."""
    shape = n.shape(0)
    if shape is None:
        return (None,)
    axis = n.attr("axis") % (len(shape) + 1)
    return ((*shape[:axis], len(n.inputs), *shape[axis:]),)


def place_unpack(n: Op) -> Placed:
    """Unstack another dimension than the split one."""
    placement, rank, count = n.placement(0), n.rank(0), len(n.output_dtypes)
    if placement.is_partial:
        return Placed((placement,) * count)
    axis = n.attr("axis") % rank if rank else placement.dim
    if not placement.is_split or axis == placement.dim:
        return whole(n)
    return Placed((split(placement.dim - (axis < placement.dim)),) * count)


def shape_unpack(n: Op) -> tuple[Shape | None, ...]:
    """Drop the unstacked dimension."""
    shape = n.shape(0)
    if not shape:
        return (None,) * len(n.output_dtypes)
    axis = n.attr("axis") % len(shape)
    return ((*shape[:axis], *shape[axis + 1 :]),) * len(n.output_dtypes)


def value_unpack(n: Op) -> Values | None:
    """One size each."""
    value = n.value(0)
    return None if value is None or n.rank(0) != 1 else tuple((entry,) for entry in value)


def _concat(n: Op) -> tuple[range, int | None]:
    """Return the pieces' input indices and the axis of Concat (axis first) or ConcatV2 (axis last)."""
    count = len(n.inputs)
    pieces, at = (range(1, count), 0) if n.op == "Concat" else (range(count - 1), count - 1)
    axis, rank = n.ints(at), n.rank(pieces[0])
    return pieces, axis[0] % rank if axis is not None and rank else None


def place_concat(n: Op) -> Placed:
    """Concatenate along another dimension than the split one; along it, each replica has a segment of each piece."""
    pieces, axis = _concat(n)
    operand_reshards = _as_segments(n, pieces, axis) if axis is not None and n.semantics.segments else None
    if axis is not None and operand_reshards is not None:
        return Placed((split(axis),), operand_reshards)
    found = join_pieces(n, pieces)
    return whole(n) if axis is None or found is None or found[0] == split(axis) else Placed((found[0],), found[1])


def _as_segments(n: Op, pieces: Sequence[int], axis: int) -> dict[int, Reshard] | None:
    """Return the conversions that split all pieces along the axis; None where a piece cannot be split, or none is."""
    sizes_of = [n.inputs[i].split_size for i in pieces if n.placement(i) == split(axis)]
    known = next((size for size in sizes_of if unit(size) is not None), None)
    operand_reshards: dict[int, Reshard] = {}
    for i in pieces:
        fact = n.inputs[i]
        if fact.placement == split(axis):
            if not parts(fact.split_size):
                return None
            continue
        block = block_of(axis, known)
        size = None if fact.shape is None else to_global(fact.shape[axis], n.semantics.extent.units)
        if block is None or not are_same(size, to_global(known, n.semantics.extent.units)):
            return None
        operand_reshards[i] = block
    return operand_reshards if sizes_of else None


def shape_concat(n: Op) -> tuple[Shape | None, ...]:
    """Add the sizes along the axis."""
    pieces, axis = _concat(n)
    shapes = [n.shape(i) for i in pieces]
    known = [shape for shape in shapes if shape is not None]
    if axis is None or len(known) < len(shapes):
        return (None,)
    total: Dim = 0
    rows = [parts(shape[axis]) for shape in known]
    if n.semantics.segments and all(n.placement(i) == split(axis) for i in pieces) and all(rows):
        total = joined([one for each in rows for one in each])
    else:
        for shape in known:
            total = add(total, shape[axis])
    return ((*known[0][:axis], total, *known[0][axis + 1 :]),)


def value_concat(n: Op) -> Values | None:
    """Join vectors of sizes, or matrices of them, such as paddings."""
    pieces, axis = _concat(n)
    values = [n.value(i) for i in pieces]
    if any(value is None for value in values) or axis is None:
        return None
    if all(n.rank(i) == 1 for i in pieces):
        return (tuple(entry for value in values for entry in value or ()),)
    known = [table for table in (array(n, i) for i in pieces) if table is not None]
    if len(known) < len(pieces) or len({(table.ndim, *np.delete(table.shape, axis)) for table in known}) > 1:
        return None
    return (flat(np.concatenate(known, axis)),)


def _cut_axis(n: Op) -> tuple[int, int | None]:
    """Return the data input and the axis of Split (axis first) or SplitV (axis last)."""
    data, at = (1, 0) if n.op == "Split" else (0, 2)
    axis, rank = n.ints(at), n.rank(data)
    return data, axis[0] % rank if axis is not None and rank else None


def place_cut(n: Op) -> Placed:
    """Split and SplitV along another dimension than the split one, or between segments."""
    data, axis = _cut_axis(n)
    placement = n.placement(data)
    others = all(fact.placement == REPLICATED for i, fact in enumerate(n.inputs) if i != data)
    if placement.is_split and axis == placement.dim:
        stays = between(n) is not None
    else:
        stays = others and (placement.is_partial or (placement.is_split and axis is not None))
    return Placed((placement,) * len(n.output_dtypes)) if stays else whole(n)


def between(n: Op) -> list[Dim] | None:
    """Return the block sizes of outputs that are cut between segments; None where they are cut elsewhere."""
    data, axis = _cut_axis(n)
    size, count = n.inputs[data].split_size, len(n.output_dtypes)
    total = rows_per_example(size)
    if axis is None or axis != n.placement(data).dim or total is None:
        return None
    if n.op == "Split":
        rows: list[int | None] = [total // count if total % count == 0 else None] * count
    else:
        rows = [-1 if entry == -1 else rows_per_example(entry) for entry in n.value(1) or ()]
        if None not in rows and rows.count(-1) == 1:
            rows[rows.index(-1)] = total - sum(one or 0 for one in rows) - 1
    if None in rows or len(rows) != count or sum(one or 0 for one in rows) != total:
        return None
    ends = [0, *accumulate(one or 0 for one in rows)]
    found = [between_seams(size, first, last) for first, last in pairwise(ends)]
    return None if None in found else found


def shape_cut(n: Op) -> tuple[Shape | None, ...]:
    """Divide the size along the axis."""
    data, axis = _cut_axis(n)
    shape, count = n.shape(data), len(n.output_dtypes)
    if shape is None or axis is None:
        return (None,) * count
    pieces: Sequence[Dim]
    if n.placement(data) == split(axis) and (seams := between(n)) is not None:
        pieces = seams
    elif n.op == "Split":
        whole_size = shape[axis]
        pieces = [whole_size // count if isinstance(whole_size, int) else None] * count
    else:
        pieces = [None if d == -1 else d for d in n.value(1) or (None,) * count]
    return tuple((*shape[:axis], piece, *shape[axis + 1 :]) for piece in pieces)


def value_cut(n: Op) -> Values | None:
    """Cut a vector of sizes, for example into those before an axis and the rest."""
    data, _ = _cut_axis(n)
    value, count = n.value(data), len(n.output_dtypes)
    if value is None or n.rank(data) != 1:
        return None
    lengths = [len(value) // count] * count if n.op == "Split" else list(n.ints(1) or ())
    if -1 in lengths:
        lengths[lengths.index(-1)] = len(value) - sum(lengths) - 1
    if len(lengths) != count or sum(lengths) != len(value):
        return None
    ends = [0, *accumulate(lengths)]
    return tuple(value[first:last] for first, last in pairwise(ends))


RULES: dict[str, Rule] = {
    "Pack": Rule(place_pack, shape_pack, by_kernel),
    "Unpack": Rule(place_unpack, shape_unpack, value_unpack),
    "Concat": Rule(place_concat, shape_concat, value_concat),
    "ConcatV2": Rule(place_concat, shape_concat, value_concat),
    "Split": Rule(place_cut, shape_cut, value_cut),
    "SplitV": Rule(place_cut, shape_cut, value_cut),
}
