"""Stacking, concatenating and cutting: fine along other dimensions than the split one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autograph_rewrite.analysis.dims import Dim
from autograph_rewrite.analysis.fact import REPLICATED, Shape, split
from autograph_rewrite.analysis.rules import sizes
from autograph_rewrite.analysis.rules.base import Op, Placed, Rule, whole
from autograph_rewrite.analysis.rules.layout import join_pieces


def _many(n: Op, placed: Placed) -> Placed:
    """Repeat a one-output answer for every output."""
    return placed._replace(outputs=placed.outputs[:1] * len(n.output_dtypes))


def place_pack(n: Op) -> Placed:
    """Stack: the new dimension goes before or after the split one."""
    found = join_pieces(n, range(len(n.inputs)))
    if found is None:
        return whole(n)
    placement, wants = found
    if not placement.is_split:
        return Placed((placement,), wants)
    axis = n.attr("axis") % ((n.rank(0) or 0) + 1)
    return Placed((split(placement.dim + (axis <= placement.dim)),), wants)


def shape_pack(n: Op) -> tuple[Shape | None, ...]:
    """Insert the number of pieces."""
    shape = n.shape(0)
    if shape is None:
        return (None,)
    axis = n.attr("axis") % (len(shape) + 1)
    return ((*shape[:axis], len(n.inputs), *shape[axis:]),)


def value_pack(n: Op) -> sizes.Values | None:
    """A vector of sizes."""
    if any(n.rank(i) != 0 or n.value(i) is None for i in range(len(n.inputs))):
        return None
    return (tuple((n.value(i) or (None,))[0] for i in range(len(n.inputs))),)


def place_unpack(n: Op) -> Placed:
    """Unstack another dimension than the split one."""
    placement, rank = n.placement(0), n.rank(0)
    if placement.is_partial:
        return _many(n, Placed((placement,)))
    if not placement.is_split or not rank:
        return whole(n)
    axis = n.attr("axis") % rank
    if axis == placement.dim:
        return whole(n)
    return _many(n, Placed((split(placement.dim - (axis < placement.dim)),)))


def shape_unpack(n: Op) -> tuple[Shape | None, ...]:
    """Drop the unstacked dimension."""
    shape = n.shape(0)
    if not shape:
        return (None,) * len(n.output_dtypes)
    axis = n.attr("axis") % len(shape)
    return ((*shape[:axis], *shape[axis + 1 :]),) * len(n.output_dtypes)


def value_unpack(n: Op) -> sizes.Values | None:
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
    """Concatenate along another dimension than the split one; along it the blocks would interleave."""
    pieces, axis = _concat(n)
    found = join_pieces(n, pieces)
    if axis is None or found is None or found[0] == split(axis):
        return whole(n)
    return Placed((found[0],), found[1])


def shape_concat(n: Op) -> tuple[Shape | None, ...]:
    """Add the sizes along the axis."""
    pieces, axis = _concat(n)
    shapes = [n.shape(i) for i in pieces]
    known = [shape for shape in shapes if shape is not None]
    if axis is None or len(known) < len(shapes):
        return (None,)
    total: Dim = 0
    for shape in known:
        total = sizes._add(total, shape[axis])
    return ((*known[0][:axis], total, *known[0][axis + 1 :]),)


def value_concat(n: Op) -> sizes.Values | None:
    """Join vectors of sizes."""
    pieces, _ = _concat(n)
    values = [n.value(i) for i in pieces]
    if any(value is None or n.rank(i) != 1 for i, value in zip(pieces, values, strict=True)):
        return None
    return (tuple(entry for value in values for entry in value or ()),)


def _cut_axis(n: Op) -> tuple[int, int | None]:
    """Return the data input and the axis of Split (axis first) or SplitV (axis last)."""
    data, at = (1, 0) if n.op == "Split" else (0, 2)
    axis, rank = n.ints(at), n.rank(data)
    return data, axis[0] % rank if axis is not None and rank else None


def place_cut(n: Op) -> Placed:
    """Split and SplitV along another dimension than the split one."""
    data, axis = _cut_axis(n)
    placement = n.placement(data)
    others = all(fact.placement == REPLICATED for i, fact in enumerate(n.inputs) if i != data)
    if placement.is_partial and others:
        return _many(n, Placed((placement,)))
    if not placement.is_split or axis is None or axis == placement.dim or not others:
        return whole(n)
    return _many(n, Placed((placement,)))


def shape_cut(n: Op) -> tuple[Shape | None, ...]:
    """Divide the size along the axis."""
    data, axis = _cut_axis(n)
    shape, count = n.shape(data), len(n.output_dtypes)
    if shape is None or axis is None:
        return (None,) * count
    parts: Sequence[Dim]
    if n.op == "Split":
        whole_size = shape[axis]
        parts = [whole_size // count if isinstance(whole_size, int) else None] * count
    else:
        parts = [None if d == -1 else d for d in n.value(1) or (None,) * count]
    return tuple((*shape[:axis], part, *shape[axis + 1 :]) for part in parts)


def value_cut(n: Op) -> sizes.Values | None:
    """Cut a vector of sizes, as one does to handle the dimensions in front of an axis apart from the rest."""
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
    "Pack": Rule(place_pack, shape_pack, value_pack, "pieces"),
    "Unpack": Rule(place_unpack, shape_unpack, value_unpack, "pieces"),
    "Concat": Rule(place_concat, shape_concat, value_concat, "pieces"),
    "ConcatV2": Rule(place_concat, shape_concat, value_concat, "pieces"),
    "Split": Rule(place_cut, shape_cut, value_cut, "pieces"),
    "SplitV": Rule(place_cut, shape_cut, value_cut, "pieces"),
}
