"""Factors of tensor lists: a handle is claimed as its elements are; a list adds a dimension that cannot be split."""

from __future__ import annotations

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.families.moves import letters
from autograph_rewrite.certify.contracts.patterns import unnamed
from autograph_rewrite.certify.contracts.seen import Seen

STATED = {"TensorListGetItem": 2, "TensorListPopBack": 1, "TensorListStack": 1, "TensorListGather": 2}
"""The operand that states the shape of the elements."""


def _stated(seen: Seen, index: int, names: Names) -> Names | None:
    """Return the names of the entries of an operand that states a shape; None for one that leaves open what is cut."""
    value, shape = seen.value(index), seen.operands[index].shape
    if value is None or shape == () or len(value) != len(names):
        return None
    return tuple("" if entry == -1 else name for name, entry in zip(names, value, strict=True))


def from_tensor(seen: Seen) -> Factors | None:
    """Rows become elements."""
    return _rows(seen, 1)


def scatter(seen: Seen) -> Factors | None:
    """Rows become elements at some places; what is at the others, nobody may read."""
    return _rows(seen, 2)


def _rows(seen: Seen, stated_by: int) -> Factors | None:
    rank = seen.rank(0)
    if not rank:
        return unnamed(seen, added=(0,), moves=True)
    names = letters(rank - 1)
    stated = _stated(seen, stated_by, names)
    rest = [stated if i == stated_by else None for i in range(1, len(seen.operands))]
    sizes = frozenset() if stated is None else frozenset((stated_by,))
    return Factors((("", *names), *rest), (names,), added=frozenset((0,)), moves=True, sizes=sizes)


def scatter_into(seen: Seen) -> Factors | None:
    """Rows become elements of a list that there is."""
    rank = seen.rank(1)
    if not rank:
        return unnamed(seen, added=(0, 1), moves=_contribute(seen, (0, 1)))
    names = letters(rank - 1)
    return Factors((names, ("", *names), None), (names,), added=frozenset((0, 1)), moves=_contribute(seen, (0, 1)))


def cut(seen: Seen) -> Factors | None:
    """Pieces along the first dimension become elements."""
    rank = seen.rank(0)
    if not rank:
        return unnamed(seen, added=(0,), moves=True)
    names = ("", *letters(rank - 1))
    stated = _stated(seen, 1, names)
    sizes = frozenset() if stated is None else frozenset((1,))
    return Factors((names, stated, None), (names,), added=frozenset((0,)), moves=True, sizes=sizes)


def concat(seen: Seen) -> Factors | None:
    """Elements one behind the other along their first dimension, and how long they are."""
    rank = seen.rank(0)
    if not rank:
        return unnamed(seen)
    names = ("", *letters(rank - 1))
    stated = _stated(seen, 1, names) if len(seen.operands) > 1 else None
    sizes = frozenset() if stated is None else frozenset((1,))
    operands = (names, stated, None)[: len(seen.operands)]
    return Factors(
        operands, (names, None), added=frozenset((0,)), moves=True, sizes=sizes, counts=frozenset((1,))
    )  # fmt: skip


def join(seen: Seen) -> Factors | None:
    """One list behind another."""
    known = [claim.shape for claim in seen.operands if claim.shape is not None]
    if not known:
        return unnamed(seen, added=(0, 1), moves=_contribute(seen, (0, 1)))
    names = letters(len(known[0]))
    return Factors((names, names), (names,), added=frozenset((0, 1)), moves=_contribute(seen, (0, 1)))


def _contribute(seen: Seen, parts: tuple[int, ...]) -> bool:
    """Return whether all parts hold contributions, or zeros that are contributions to a sum."""
    sums = all(claim.op == "sum" for claim in seen.operands if claim.kind == "partial")
    return all(seen.operands[i].kind in ("partial", "any") or (seen.operands[i].zero and sums) for i in parts)


def push(seen: Seen) -> Factors | None:
    """One element more, like the others."""
    return _joined(seen, 1)


def set_item(seen: Seen) -> Factors | None:
    """One element instead of another."""
    return _joined(seen, 2)


def _joined(seen: Seen, item: int) -> Factors | None:
    rank = seen.rank(item) if seen.operands[item].shape is not None else seen.rank(0)
    if rank is None:
        return unnamed(seen, added=(0, item), moves=_contribute(seen, (0, item)))
    names = letters(rank)
    operands = tuple(names if i in (0, item) else None for i in range(len(seen.operands)))
    return Factors(operands, (names,), added=frozenset((0, item)), moves=_contribute(seen, (0, item)))


def take(seen: Seen) -> Factors | None:
    """Read one element, or stack some."""
    op, rank = seen.node.op, seen.rank(0)
    stacks = op in ("TensorListStack", "TensorListGather")
    if rank is None:
        return unnamed(seen, added=(0,), moves=True)
    names = letters(rank)
    stated = _stated(seen, STATED[op], names)
    operands = tuple(names if i == 0 else stated if i == STATED[op] else None for i in range(len(seen.operands)))
    sizes = frozenset() if stated is None else frozenset((STATED[op],))
    made: tuple[Names, ...] = (names, names) if op == "TensorListPopBack" else (("", *names) if stacks else names,)
    return Factors(operands, made, added=frozenset((0,)), moves=True, sizes=sizes)


def make(seen: Seen) -> Factors | None:
    """An empty list, or one of zeros; where its element shape counts a block, its elements will be blocks."""
    value = seen.value(0)
    names = letters(len(value or ()))
    local = seen.operands[0].kind == "local"
    sizes = frozenset((0,)) if local else frozenset()
    is_zero = seen.node.op == "TensorListReserve"
    return Factors((names if local else None, None), (names,), sizes=sizes, is_zero=is_zero)


def keep(seen: Seen) -> Factors | None:
    """A longer or shorter list of the same; new elements are zeros."""
    rank, moves = seen.rank(0), seen.operands[0].op == "sum"
    if rank is None:
        return unnamed(seen, added=(0,), moves=moves)
    return Factors((letters(rank), None), (letters(rank),), added=frozenset((0,)), moves=moves)
