"""Factors of slices: a dimension that is taken in full keeps its split.

x[:, 1:3]    dimension 0 is taken whole, of dimension 1 nothing can be said
x[:b, 1:3]   the same, where b is the size of a block of x
"""

from __future__ import annotations

from typing import NamedTuple

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.families.moves import letters
from autograph_rewrite.certify.contracts.patterns import unnamed
from autograph_rewrite.certify.contracts.seen import Seen, is_local, whole
from autograph_rewrite.ir.claims import Dim


class Part(NamedTuple):
    """What a slice takes of one dimension.

    Attributes:
        source: dimension of the operand; None for a new one.
        target: dimension of the result; None for one that is dropped.
        entry: position in the specification; None for a dimension that it does not name.
    """

    source: int | None
    target: int | None
    entry: int | None


def slice_(seen: Seen) -> Factors | None:
    """Slice: from the first row on, all of them."""
    data, begin, size = seen.operands[0], seen.ints(1), seen.value(2)
    if begin is None or size is None or data.shape is None:
        return unnamed(seen, added=(0,), moves=True)
    names = letters(len(begin))
    kept = tuple(
        name if first == 0 and (count == -1 or is_local(count) or count == dim) else ""
        for name, first, count, dim in zip(names, begin, size, data.shape, strict=True)
    )
    stated = tuple(name if is_local(count) else "" for name, count in zip(kept, size, strict=True))
    return Factors((kept, None, stated), (kept,), added=frozenset((0,)), moves=True, sizes=_sizes(stated, 2))


def _sizes(stated: Names, index: int) -> frozenset[int]:
    return frozenset((index,)) if any(stated) else frozenset()


def strided_slice(seen: Seen) -> Factors | None:
    """StridedSlice: as in Python, with bits that say which bounds count."""
    rank = seen.rank(0)
    parts = None if rank is None else parts_of(seen, rank, 1)
    if parts is None or rank is None:
        return unnamed(seen, added=(0,), moves=True)
    shape = seen.operands[0].shape or ()
    names, made, ends = _names(seen, parts, shape, rank, 1)
    return Factors((names, None, ends, None), (made,), added=frozenset((0,)), moves=True, sizes=_sizes(ends, 2))


def strided_slice_grad(seen: Seen) -> Factors | None:
    """StridedSliceGrad: puts rows back where a slice has taken them, with zeros around."""
    target = seen.value(0)
    parts = None if target is None else parts_of(seen, len(target), 1)
    if parts is None or target is None:
        return unnamed(seen, added=(4,), moves=False, linear=(4,))
    names, made, ends = _names(seen, parts, target, len(target), 1)
    sizes = _sizes(ends, 2) | {0}
    return Factors((names, None, ends, None, made), (names,), linear=(4,), sizes=sizes)


def _names(seen: Seen, parts: list[Part], shape: tuple[Dim, ...], rank: int, first: int) -> tuple[Names, Names, Names]:
    """Return names of the dimensions of the source, of the slice, and of the entries of its ends."""
    source, made = [""] * rank, [""] * sum(part.target is not None for part in parts)
    ends = [""] * len(_bounds(seen, first + 1))
    for part in parts:
        if part.source is None or part.target is None or not _takes_all(seen, part, shape[part.source], first):
            continue
        source[part.source] = made[part.target] = f"d{part.source}"
        if part.entry is not None and is_local(_bounds(seen, first + 1)[part.entry]):
            ends[part.entry] = f"d{part.source}"
    return tuple(source), tuple(made), tuple(ends)


def _bounds(seen: Seen, index: int) -> tuple[Dim, ...]:
    """Return the entries of a specification, None for those that are computed; nothing where their number is open."""
    value, shape = seen.value(index), seen.operands[index].shape
    if value is None and shape is not None and len(shape) == 1 and isinstance(shape[0], int):
        return (None,) * shape[0]
    return value or ()


def _takes_all(seen: Seen, part: Part, dim: Dim, first: int) -> bool:
    if part.entry is None:
        return True
    begin, end, step = (_bounds(seen, first + i)[part.entry] for i in range(3))
    from_start = _bit(seen, "begin_mask", part.entry) or begin == 0
    everything = whole(dim, seen.batch)
    to_end = _bit(seen, "end_mask", part.entry) or (end is not None and end == dim)
    to_end = to_end or (isinstance(end, int) and isinstance(everything, int) and end == everything)
    return bool(step == 1 and from_start and to_end)


def parts_of(seen: Seen, rank: int, first: int) -> list[Part] | None:
    """Return what a slice takes of each dimension; None where its specification is not known.

    Args:
        seen: claims about the slice.
        rank: of the operand that is sliced.
        first: operand `begin`; `end` and `strides` follow.
    """
    if any(not _bounds(seen, first + i) for i in range(3)):
        return None
    count = len(_bounds(seen, first))
    added = sum(_bit(seen, "new_axis_mask", i) for i in range(count))
    dots = [i for i in range(count) if _bit(seen, "ellipsis_mask", i)]
    spread = rank - (count - added - len(dots))
    found: list[Part] = []
    source = target = 0
    for entry in range(count):
        if entry in dots:
            found += [Part(source + i, target + i, None) for i in range(spread)]
            source, target = source + spread, target + spread
        elif _bit(seen, "new_axis_mask", entry):
            found.append(Part(None, target, entry))
            target += 1
        elif _bit(seen, "shrink_axis_mask", entry):
            found.append(Part(source, None, entry))
            source += 1
        else:
            found.append(Part(source, target, entry))
            source, target = source + 1, target + 1
    return found + [Part(source + i, target + i, None) for i in range(rank - source)]


def _bit(seen: Seen, mask: str, at: int) -> bool:
    return bool(seen.node.attr(mask, 0) >> at & 1)
