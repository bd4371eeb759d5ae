"""Slicing, padding and reversing: free along other dimensions than the split one, which must stay complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import (
    BLOCK,
    Dim,
    Sym,
    any_local,
    are_same,
    between_seams,
    rows_per_example,
    seam,
    segments,
    to_global,
)
from autograph_rewrite.ops.rules.base import (
    LocalEntry,
    Op,
    Placed,
    Reshard,
    Rule,
    Values,
    block_of,
    like_first,
    others_whole,
    whole,
)
from autograph_rewrite.ops.rules.kernels import array, by_kernel, subtract
from autograph_rewrite.ops.traits import has


def place_slice(n: Op) -> Placed:
    """Slice: the slice must contain the whole split dimension."""
    placement, begin, size = n.placement(0), n.ints(1), n.value(2)
    if placement.is_partial and all(f.placement == REPLICATED for f in n.inputs[1:]):
        return Placed((placement,))
    if (operand_reshards := _slice_between(n)) is not None:
        return Placed((placement,), operand_reshards[1])
    if not placement.is_split or begin is None or size is None or begin[placement.dim] != 0:
        return whole(n)
    block, wanted = n.inputs[0].split_size, size[placement.dim]
    if wanted == -1 or are_same(wanted, block):
        return Placed((placement,))
    if isinstance(wanted, int) and wanted == to_global(block, n.semantics.extent.units):
        return Placed((placement,), {2: LocalEntry(placement.dim, block)})
    return whole(n)


def _slice_between(n: Op) -> tuple[Dim, dict[int, Reshard]] | None:
    """Return the block size of a Slice between segments, and the conversions of its bounds."""
    placement, begin, size = n.placement(0), n.value(1), n.value(2)
    block = n.inputs[0].split_size
    if not segments(block) or begin is None or size is None or any(n.placement(i).is_split for i in (1, 2)):
        return None
    dim, batch = placement.dim, n.semantics.extent.units
    first, count = seam(begin[dim], batch), None if size[dim] == -1 else seam(size[dim], batch)
    total = rows_per_example(block) or 0
    if first is None or (count is None and size[dim] != -1):
        return None
    last = total if count is None else first + count
    found = between_seams(block, first, last)
    if found is None or any_local((*begin[:dim], *begin[dim + 1 :], *size[:dim], *size[dim + 1 :])):
        return None
    operand_reshards: dict[int, Reshard] = {}
    if isinstance(begin[dim], int) and first:
        operand_reshards[1] = LocalEntry(dim, Sym(first, (BLOCK,)))
    if isinstance(size[dim], int) and size[dim] != -1:
        operand_reshards[2] = LocalEntry(dim, found)
    return found, operand_reshards


def shape_slice(n: Op) -> tuple[Shape | None, ...]:
    """Return the stated sizes, with -1 computed."""
    shape, begin, size = n.shape(0), n.ints(1), n.value(2)
    if shape is None or size is None:
        return (None,)
    dims: list[Dim] = []
    seams = _slice_between(n)
    for i, wanted in enumerate(size):
        if seams is not None and i == n.placement(0).dim:
            dims.append(seams[0])
            continue
        start = begin[i] if begin is not None else None
        rest = shape[i] if start == 0 else None if start is None else subtract(shape[i], start)
        dims.append(rest if wanted == -1 else wanted)
    return (tuple(dims),)


SOMEWHERE = Sym(1, ("?",))
"""A bound that is computed and unknown; a bound that a mask leaves out is None."""


class Cut(NamedTuple):
    """One dimension of a strided slice.

    `source` is None for a new dimension, `target` None for a dropped one; `span` (begin, end, step) is None if the
    slice contains the whole dimension. `entry` is the position in the specification.
    """

    source: int | None
    target: int | None
    span: tuple[Dim, Dim, Dim] | None
    entry: int | None = None


def _bounds(n: Op, index: int) -> tuple[Dim, ...] | None:
    """Return the entries of one operand of a strided slice, None if not even their number is known."""
    value, shape = n.value(index), n.shape(index)
    if value is None and shape is not None and len(shape) == 1 and isinstance(shape[0], int):
        return (SOMEWHERE,) * shape[0]
    return None if value is None else tuple(SOMEWHERE if entry is None else entry for entry in value)


def strided_cuts(n: Op, rank: int, first: int) -> list[Cut] | None:
    """Read a strided-slice specification; None if it is not known.

    Args:
        rank: of the operand that is sliced.
        first: position of the `begin` operand.
    """
    spec = [_bounds(n, first + i) for i in range(3)]
    if any(part is None for part in spec):
        return None
    begin, end, step = (part or () for part in spec)
    masks = {m: n.attr(f"{m}_mask") for m in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    count = len(begin)
    new_axes = sum(1 for i in range(count) if masks["new_axis"] >> i & 1)
    has_ellipsis = masks["ellipsis"] != 0
    covered = count - new_axes - (1 if has_ellipsis else 0)
    cuts: list[Cut] = []
    source = target = 0

    def take_whole(dims: int) -> None:
        nonlocal source, target
        for _ in range(dims):
            cuts.append(Cut(source, target, None))
            source, target = source + 1, target + 1

    for i in range(count):
        if masks["ellipsis"] >> i & 1:
            take_whole(rank - covered)
        elif masks["new_axis"] >> i & 1:
            cuts.append(Cut(None, target, None))
            target += 1
        elif masks["shrink_axis"] >> i & 1:
            cuts.append(Cut(source, None, (begin[i], None, 1)))
            source += 1
        else:
            low = None if masks["begin"] >> i & 1 else begin[i]
            high = None if masks["end"] >> i & 1 else end[i]
            everything = low in (None, 0) and high is None and step[i] == 1
            cuts.append(Cut(source, target, None if everything else (low, high, step[i]), i))
            source, target = source + 1, target + 1
    take_whole(rank - source)
    return cuts


def _keeps_whole(cut: Cut, size: Dim) -> bool:
    """Return whether a cut contains the whole of its dimension, which has that size."""
    return cut.span is None or (cut.span[0] in (None, 0) and are_same(cut.span[1], size) and cut.span[2] == 1)


def place_strided_slice(n: Op) -> Placed:
    """StridedSlice: the slice must contain the whole split dimension."""
    placement, rank = n.placement(0), n.rank(0)
    if placement.is_partial and all(f.placement == REPLICATED for f in n.inputs[1:]):
        return Placed((placement,))
    cuts = strided_cuts(n, rank, 1) if rank is not None and placement.is_split else None
    cut = next((c for c in cuts or () if c.source == placement.dim), None)
    operand_reshards = _bounds_of_others(n, cuts or (), cut)
    if cut is None or cut.target is None or operand_reshards is None:
        return whole(n)
    size = n.inputs[0].split_size
    if _keeps_whole(cut, size):
        return Placed((split(cut.target),), operand_reshards)
    if segments(size):
        found = _between(cut, size, n.semantics.extent.units)
        return whole(n) if found is None else Placed((split(cut.target),), {**operand_reshards, **found[1]})
    everything = to_global(size, n.semantics.extent.units)
    if isinstance(everything, int) and _keeps_whole(cut, everything):
        return Placed((split(cut.target),), operand_reshards)  # a constant end at the whole size also ends every block
    return whole(n)


def _between(cut: Cut, size: Dim, batch: int | None) -> tuple[Dim, dict[int, Reshard]] | None:
    """Return the block size of a cut between segments, and the conversions of its bounds."""
    total = rows_per_example(size)
    if cut.span is None or cut.entry is None or total is None or cut.span[2] != 1:
        return None
    bounds = [(1, cut.span[0], 0), (2, cut.span[1], total)]
    at = [end if bound is None else seam(bound, batch) for _, bound, end in bounds]
    if at[0] is None or at[1] is None:
        return None
    found = between_seams(size, at[0], at[1])
    operand_reshards: dict[int, Reshard] = {
        index: LocalEntry(cut.entry, Sym(rows, (BLOCK,)))
        for (index, bound, _), rows in zip(bounds, at, strict=True)
        if isinstance(bound, int) and rows
    }
    return None if found is None else (found, operand_reshards)


def _bounds_of_others(n: Op, cuts: Sequence[Cut], own: Cut | None) -> dict[int, Reshard] | None:
    """Return the conversions of the bounds (inputs 1 to 3), of which only that of the split dimension may be local.

    None where a bound of another dimension is local, too.
    """
    differing = [i for i in (1, 2, 3) if n.placement(i).differs]
    if own is None or own.span is None:
        return dict.fromkeys(differing, REPLICATED)
    known = all(n.value(i) is not None for i in differing)
    return {} if known and not any(any_local(cut.span) for cut in cuts if cut is not own) else None


def shape_strided_slice(n: Op) -> tuple[Shape | None, ...]:
    """Compute each dimension whose bounds are plain integers."""
    shape = n.shape(0)
    cuts = strided_cuts(n, len(shape), 1) if shape is not None else None
    if shape is None or cuts is None:
        return (None,)
    own = n.placement(0).dim if n.placement(0).is_split else -1
    dims: list[Dim] = []
    for cut in cuts:
        if cut.target is None:
            continue
        size = shape[cut.source] if cut.source is not None else 1
        found = _between(cut, size, n.semantics.extent.units) if cut.source == own else None
        if found is not None:
            dims.append(found[0])
        else:
            dims.append(size if cut.span is None or _keeps_whole(cut, size) else _extent(size, cut.span))
    return (tuple(dims),)


def _extent(size: Dim, span: tuple[Dim, Dim, Dim]) -> Dim:
    low, high, step = span
    are_known = isinstance(step, int) and all(isinstance(v, int | None) for v in (low, high))
    if not are_known or not isinstance(size, int):
        return None
    return len(range(size)[slice(low, high, step)])  # type: ignore[arg-type]


def place_strided_slice_grad(n: Op) -> Placed:
    """The gradient of a slice with the whole split dimension is split along the source dimension."""
    gradient, target = n.placement(4), n.value(0)
    others = all(f.placement == REPLICATED for f in n.inputs[:4])
    if gradient == PARTIAL and others:
        return Placed((PARTIAL,))
    cuts = strided_cuts(n, len(target), 1) if target is not None and gradient.is_split else None
    cut = next((c for c in cuts or () if c.target == gradient.dim), None)
    operand_reshards = _bounds_of_others(n, cuts or (), cut)
    if cut is None or cut.source is None or target is None or operand_reshards is None:
        return whole(n)
    if any_local(target[: cut.source] + target[cut.source + 1 :]):
        return whole(n)
    size, wanted = n.inputs[4].split_size, target[cut.source]
    if are_same(wanted, size) and _keeps_whole(cut, size):
        return Placed((split(cut.source),), operand_reshards)
    found = _between(cut, wanted, n.semantics.extent.units) if segments(wanted) else None
    if found is not None:
        return Placed((split(cut.source),), {**operand_reshards, **found[1]}) if are_same(found[0], size) else whole(n)
    everything = to_global(size, n.semantics.extent.units)
    if isinstance(wanted, int) and wanted == everything and _keeps_whole(cut, everything):
        return Placed((split(cut.source),), {0: LocalEntry(cut.source, size), **operand_reshards})
    return whole(n)


def place_pad(n: Op) -> Placed:
    """Padding must leave the split dimension alone; padding with zeros is linear."""
    placement, pads = n.placement(0), array(n, 1)
    if n.op == "Pad" and placement == PARTIAL and n.placement(1) == REPLICATED:
        return Placed((PARTIAL,))
    if not placement.is_split or pads is None or n.placement(1).differs:
        return whole(n)
    out_of_reach = has(n.op, "refuses_empty") and n.rank(0) is None  # the pass that pads empty blocks needs the rank
    if out_of_reach or pads[placement.dim].tolist() != [0, 0]:
        return whole(n)
    return Placed((placement,), others_whole(n, 0, 1))


def shape_pad(n: Op) -> tuple[Shape | None, ...]:
    """Add the padding (or subtract it, for the gradient)."""
    shape, pads = n.shape(0), array(n, 1)
    if shape is None or pads is None:
        return (None,)
    sign = -1 if n.op == "MirrorPadGrad" else 1
    dims: list[Dim] = []
    for dim, row in zip(shape, pads.tolist(), strict=True):
        total = row[0] + row[1] if all(isinstance(v, int) for v in row) else None
        dims.append(dim if total == 0 else dim + sign * total if isinstance(dim, int) and total is not None else None)
    return (tuple(dims),)


def value_pad(n: Op) -> Values | None:
    """Pad a vector of sizes, such as a shape that gets more dimensions."""
    value, pads, edge = n.value(0), n.ints(1), n.value(2) if n.op == "PadV2" else (0,)
    if value is None or n.rank(0) != 1 or pads is None or len(pads) != 2 or edge is None or len(edge) != 1:
        return None
    return ((*edge * pads[0], *value, *edge * pads[1]),)


def place_reverse(n: Op) -> Placed:
    """Reverse other dimensions than the split one; along that, each block gets rows of other blocks."""
    return place_moved(n, n.ints(1))


def place_roll(n: Op) -> Placed:
    """Shift other dimensions than the split one; along that, each block gets rows of other blocks."""
    return place_moved(n, n.ints(2))


def place_moved(n: Op, dims: Sequence[int] | None) -> Placed:
    """Place an op that changes the order of rows along `dims`, and keeps the shape."""
    placement, rank = n.placement(0), n.rank(0)
    if placement.is_partial and all(fact.placement == REPLICATED for fact in n.inputs[1:]):
        return Placed((placement,))
    if not placement.is_split or dims is None or rank is None:
        return whole(n)
    if placement.dim not in {dim % rank for dim in dims}:
        return Placed((placement,), others_whole(n, 0))
    has_blocks = block_of(placement.dim, n.inputs[0].split_size) is not None and not n.semantics.extent.is_known
    return whole(n)._replace(decompose=has_blocks)  # `passes.canonicalize.decompose` splits the whole result again


RULES: dict[str, Rule] = {
    "Slice": Rule(place_slice, shape_slice, by_kernel),
    "StridedSlice": Rule(place_strided_slice, shape_strided_slice, by_kernel),
    "StridedSliceGrad": Rule(place_strided_slice_grad, lambda n: (n.value(0),)),
    "Pad": Rule(place_pad, shape_pad, value_pad),
    "PadV2": Rule(place_pad, shape_pad, value_pad),
    "MirrorPad": Rule(place_pad, shape_pad),
    "MirrorPadGrad": Rule(place_pad, shape_pad),
    "ReverseV2": Rule(place_reverse, like_first),
    "Roll": Rule(place_roll, like_first),
}
