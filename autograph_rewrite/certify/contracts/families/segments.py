"""Contracts of segments: which ops make them, keep them and consume them.

concat(%a: b, %b: 2*b) -> b[1,2]     rows of a, then rows of b; a cut at `b` gives them back
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import gcd

from autograph_rewrite.certify.contracts.families.slices import Part, parts_of
from autograph_rewrite.certify.contracts.seen import BLOCK, Seen, is_local, said
from autograph_rewrite.ir.claims import SEGMENTS, Claim, Dim, segment_rows

JOINS = frozenset(("Concat", "ConcatV2"))
CUTS = frozenset(("Split", "SplitV", "Slice", "StridedSlice", "StridedSliceGrad"))


def joined(rows: Sequence[int]) -> Dim:
    """Return the size of a block of which one example has so many rows in each segment."""
    common = gcd(*rows)
    if len(rows) == 1:
        return (common, (BLOCK,))
    return (common, (f"{SEGMENTS}{','.join(str(one // common) for one in rows)}]",))


def rows_of(dim: Dim) -> tuple[int, ...]:
    """Return how many rows of each segment one example has; nothing where that does not follow from the size."""
    if not isinstance(dim, tuple) or len(dim[1]) != 1:
        return ()
    (factor,) = dim[1]
    return tuple(dim[0] * one for one in ((1,) if factor == BLOCK else segment_rows(factor)))


def _cut_size(claim: Claim) -> Dim:
    is_known = claim.kind == "split" and claim.shape is not None and claim.dim < len(claim.shape)
    return claim.shape[claim.dim] if is_known and claim.shape is not None else None


def _symbols(dims: Iterable[Dim]) -> set[str]:
    """Return the symbols of blocks with segments in some sizes."""
    factors = (factor for dim in dims if isinstance(dim, tuple) for factor in dim[1])
    return {factor for factor in factors if factor.startswith(SEGMENTS)}


def have_segments(claims: Iterable[Claim]) -> bool:
    """Return whether some value is a block with segments."""
    return any(_symbols((_cut_size(claim),)) for claim in claims)


def lose_segments(seen: Seen) -> str | None:
    """Return which result has other segments than the blocks that are read.

    An op cannot tell in which order the rows of a block are; so whatever it makes of them has their segments.
    """
    cut = [claim for claim in seen.operands if claim.kind == "split"]
    read = [_symbols((_cut_size(claim),)) for claim in cut]
    if not cut:
        read = [_symbols(claim.value or ()) for claim in seen.operands if claim.kind == "local"]
    for index, claim in enumerate(seen.results):
        made = _symbols((_cut_size(claim),))
        if claim.kind == "split" and (made or any(read)) and any(one != made for one in read or [set()]):
            return f"result {index} is claimed {said(claim)}, with blocks of {_cut_size(claim)} that nobody has read"
    return None


def judge_pieces(seen: Seen) -> tuple[bool, str | None]:
    """Return whether a node joins blocks to segments, or cuts between segments; and what is wrong with it."""
    op = seen.node.op
    if op in JOINS:
        return _joined(seen)
    if op in ("Split", "SplitV"):
        return _pieces(seen)
    if op in ("Slice", "StridedSlice"):
        return _slice(seen)
    return _slice_gradient(seen) if op == "StridedSliceGrad" else (False, None)


def _joined(seen: Seen) -> tuple[bool, str | None]:
    count = len(seen.operands)
    at, pieces = (0, range(1, count)) if seen.node.op == "Concat" else (count - 1, range(count - 1))
    rank, made = seen.rank(pieces[0]), seen.results[0]
    axis = seen.axis(at, rank) if rank else None
    if made.kind != "split" or made.dim != axis:
        return False, None
    rows: list[int] = []
    for i in pieces:
        claim = seen.operands[i]
        mine = rows_of(_cut_size(claim))
        if claim.kind != "split" or claim.dim != axis or not mine:
            return True, f"input {i} is {said(claim)}, and is to be a segment of blocks"
        rows += mine
    return True, _made(seen, [joined(rows)])


def _pieces(seen: Seen) -> tuple[bool, str | None]:
    data, at = (1, 0) if seen.node.op == "Split" else (0, 2)
    claim, rank, count = seen.operands[data], seen.rank(data), len(seen.results)
    if claim.kind != "split" or not rank or seen.axis(at, rank) != claim.dim:
        return False, None
    size = _cut_size(claim)
    total = sum(rows_of(size))
    if seen.node.op == "Split":
        ends = [i * total // count for i in range(count + 1)] if total % count == 0 else []
    else:
        counts = [-1 if entry == -1 else sum(rows_of(entry)) for entry in seen.value(1) or ()]
        if counts.count(-1) == 1:
            counts[counts.index(-1)] = total - sum(counts) - 1
        ends = [0, *accumulate(counts)]
        if 0 in counts or ends[-1] != total:
            ends = []
    return True, _made(seen, [_between(size, a, b) for a, b in pairwise(ends)])


def _slice(seen: Seen) -> tuple[bool, str | None]:
    claim, made = seen.operands[0], seen.results[0]
    if not have_segments((claim,)) or made.kind != "split" or _cut_size(made) == _cut_size(claim):
        return False, None
    if seen.node.op == "Slice":
        begin, count = seen.value(1), seen.value(2)
        if begin is None or count is None or claim.dim >= min(len(begin), len(count)):
            return True, "its bounds are not known"
        others = [entry for bound in (begin, count) for i, entry in enumerate(bound) if i != claim.dim]
        first, rows = _seam(begin[claim.dim]), _seam(count[claim.dim])
        total = sum(rows_of(_cut_size(claim)))
        end = total if count[claim.dim] == -1 else None if None in (first, rows) else (first or 0) + (rows or 0)
        if any(map(is_local, others)) or first is None or end is None:
            return True, "its bounds are not between segments"
        return True, _made(seen, [_between(_cut_size(claim), first, end)], dim=claim.dim)
    parts = parts_of(seen, len(claim.shape or ()), 1)
    part = next((part for part in parts or () if part.source == claim.dim), None)
    if part is None or part.target is None:
        return True, "its bounds are not known"
    return True, _made(seen, [_taken(seen, part, _cut_size(claim))], dim=part.target)


def _slice_gradient(seen: Seen) -> tuple[bool, str | None]:
    target, claim, made = seen.value(0), seen.operands[4], seen.results[0]
    if target is None or made.kind != "split" or made.dim >= len(target) or claim.kind != "split":
        return False, None
    if not _symbols((target[made.dim],)) or target[made.dim] == _cut_size(claim):
        return False, None
    parts = parts_of(seen, len(target), 1)
    part = next((part for part in parts or () if part.source == made.dim), None)
    if part is None or part.target != claim.dim or any(is_local(d) for i, d in enumerate(target) if i != made.dim):
        return True, "its bounds are not between segments"
    if _taken(seen, part, target[made.dim]) != _cut_size(claim):
        return True, f"blocks of {_cut_size(claim)} are not what it takes of {target[made.dim]}"
    return True, _made(seen, [target[made.dim]])


def _taken(seen: Seen, part: Part, size: Dim) -> Dim:
    """Return the size of a block of what a strided slice takes between segments."""
    if part.entry is None:
        return size
    begin, end, step = ((seen.value(1 + i) or ())[part.entry : part.entry + 1] for i in range(3))
    masks = [seen.node.attr(f"{name}_mask", 0) >> part.entry & 1 for name in ("begin", "end")]
    first = 0 if masks[0] else _seam(*begin)
    last = sum(rows_of(size)) if masks[1] else _seam(*end)
    return None if step != (1,) or first is None or last is None else _between(size, first, last)


def _seam(entry: Dim = None) -> int | None:
    return 0 if entry == 0 else sum(rows_of(entry)) or None


def _between(size: Dim, begin: int, end: int) -> Dim:
    rows = rows_of(size)
    seams = [0, *accumulate(rows)]
    if begin not in seams or end not in seams or begin >= end:
        return None
    return joined(rows[seams.index(begin) : seams.index(end)])


def _made(seen: Seen, sizes: Sequence[Dim], dim: int | None = None) -> str | None:
    """Return which result is not a block of the size that it has to be."""
    if len(sizes) != len(seen.results) or None in sizes:
        return "it does not cut between segments"
    for index, (claim, size) in enumerate(zip(seen.results, sizes, strict=True)):
        if claim.kind != "split" or (dim is not None and claim.dim != dim) or _cut_size(claim) != size:
            return (
                f"result {index} is claimed {said(claim)} with blocks of {_cut_size(claim)}, and has blocks of {size}"
            )
        if claim.zero and not all(one.zero for one in seen.operands if one.kind == "split"):
            return f"result {index} is claimed to be zero, and nothing says so"
    return None
