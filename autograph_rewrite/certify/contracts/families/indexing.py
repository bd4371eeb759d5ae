"""Factors of gathers and scatters: the table is replicated along the indexed dimensions."""

from __future__ import annotations

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.families.moves import letters
from autograph_rewrite.certify.contracts.patterns import unnamed
from autograph_rewrite.certify.contracts.seen import Seen


def gather(seen: Seen) -> Factors | None:
    """Rows of a table by their numbers; linear in the table."""
    rank, index_rank = seen.rank(0), seen.rank(1)
    axis = seen.axis(2, rank) if rank and seen.node.op == "GatherV2" else 0
    shared = seen.node.attr("batch_dims", 0) if seen.node.op == "GatherV2" else 0
    if not rank or index_rank is None or axis is None:
        return unnamed(seen, linear=(0,))
    shared += index_rank if shared < 0 else 0
    table = letters(rank, "t")
    indices = table[:shared] + letters(index_rank - shared, "i")
    made = table[:axis] + indices[shared:] + table[axis + 1 :]
    looked_in = tuple("" if i == axis else name for i, name in enumerate(table))
    operands: tuple[Names | None, ...] = (looked_in, indices, None)
    return Factors(operands[: len(seen.operands)], (made,), linear=(0,))


def resource_gather(seen: Seen) -> Factors | None:
    """Rows of a variable, which is whole."""
    indices, made = seen.rank(1), seen.results[0].shape
    if indices is None:
        return None
    names, shared = letters(indices, "i"), seen.node.attr("batch_dims", 0)
    names = ("",) * shared + names[shared:]
    behind = len(made) - indices if made is not None else 0
    return Factors((None, names), (names + ("",) * behind,))


def resource_gather_nd(seen: Seen) -> Factors | None:
    """Elements of a variable, which is whole."""
    indices, made = seen.rank(1), seen.results[0].shape
    if not indices:
        return None
    names = letters(indices - 1, "i")
    behind = len(made) - len(names) if made is not None else 0
    return Factors((None, (*names, "")), (names + ("",) * behind,))


def _by_rows(seen: Seen, table_rank: int | None, index: int) -> tuple[Names, Names, Names] | None:
    """Return names of a table, of indices whose rows address its first dimensions, and of what they address."""
    shape = seen.operands[index].shape
    depth = shape[-1] if shape else None
    if table_rank is None or not isinstance(depth, int) or shape is None or depth > table_rank:
        return None
    rows, rest = letters(len(shape) - 1, "i"), letters(table_rank - depth, "t")
    return ("",) * depth + rest, (*rows, ""), rows + rest


def gather_nd(seen: Seen) -> Factors | None:
    """Elements by the rows of an index matrix."""
    found = _by_rows(seen, seen.rank(0), 1)
    return unnamed(seen, linear=(0,)) if found is None else Factors(found[:2], found[2:], linear=(0,))


def scatter_nd(seen: Seen) -> Factors | None:
    """Rows are added where their index says: split with their indices, they make contributions."""
    target, made = seen.value(2), seen.results[0].shape
    stated = target if target is not None else made
    found = _by_rows(seen, None if stated is None else len(stated), 0)
    if found is None:
        return unnamed(seen, linear=(1,))
    table, indices, updates = found
    sizes = frozenset((2,)) if target is not None else frozenset()
    return Factors((indices, updates, table), (table,), frozenset(indices) - {""}, linear=(1,), sizes=sizes)


def tensor_scatter(seen: Seen) -> Factors | None:
    """Rows of a table are replaced, or changed: every index may hit every row."""
    found = _by_rows(seen, seen.rank(0), 1)
    if found is None:
        return None
    table, indices, updates = found
    rows = len(indices) - 1
    return Factors((table, ("",) * len(indices), ("",) * rows + updates[rows:]), (table,))


def one_hot(seen: Seen) -> Factors | None:
    """A dimension more, in which one element is on."""
    rank, axis = seen.rank(0), seen.node.attr("axis", -1)
    if rank is None:
        return None
    names, at = letters(rank), rank if axis == -1 else axis
    return Factors((names, None, None, None), ((*names[:at], "", *names[at:]),))


def segment_sum(seen: Seen) -> Factors | None:
    """UnsortedSegmentSum: rows are added where their number says, whatever their order."""
    found = _segments(seen)
    if found is None:
        return unnamed(seen, linear=(0,))
    ids, rest = found
    return Factors((ids + rest, ids, None), (("", *rest),), frozenset(ids), linear=(0,))


def segment_other(seen: Seen) -> Factors | None:
    """Other folds by segment: of a segment without rows in a block, the block knows nothing."""
    found = _segments(seen)
    if found is None:
        return None
    ids, rest = found
    shut = ("",) * len(ids)
    return Factors((shut + rest, shut, None), (("", *rest),))


def _segments(seen: Seen) -> tuple[Names, Names] | None:
    rank, ids = seen.rank(0), seen.rank(1)
    return None if rank is None or ids is None or ids > rank else (letters(ids, "i"), letters(rank - ids))


def sorted_segments(seen: Seen) -> Factors | None:
    """Segments of neighbours: only dimensions behind the first are free."""
    rank = seen.rank(0)
    linear = (0,) if any(word in seen.node.op for word in ("Sum", "Mean", "Sqrt")) else ()
    if not rank:
        return unnamed(seen, linear=linear)
    names = ("", *letters(rank - 1))
    return Factors((names, *(None,) * (len(seen.operands) - 1)), (names,), linear=linear)


def counts(seen: Seen) -> Factors | None:
    """Counts of a vector's blocks add up; DenseBincount of a matrix counts each row by itself."""
    rank = seen.rank(0)
    if seen.node.op == "DenseBincount" and rank == 2:
        return bincount(seen)
    if rank is None:
        return None
    names = letters(rank)
    weights = None if seen.operands[2].shape == (0,) else names
    fold = "max" if seen.node.op == "DenseBincount" and seen.node.attr("binary_output", False) else "sum"
    return Factors((names, None, weights), (("",),), frozenset(names), fold)


def table_lookup(seen: Seen) -> Factors | None:
    """What a table says of each key."""
    rank, made = seen.rank(1), seen.results[0].shape
    if rank is None or made is None or len(made) < rank:
        return None
    names = letters(rank)
    return Factors((None, names, None), (names + ("",) * (len(made) - rank),))


def bincount(seen: Seen) -> Factors | None:
    """DenseBincount of a matrix counts each row by itself."""
    if seen.rank(0) != 2:
        return None
    weights = ("row", "") if seen.rank(2) == 2 else None
    return Factors((("row", ""), None, weights), (("row", ""),))
