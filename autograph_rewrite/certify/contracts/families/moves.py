"""Factors of ops that move, select or reduce elements: they follow from axes, bounds and shapes among the operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.patterns import factors_of, unnamed
from autograph_rewrite.certify.contracts.seen import Seen, is_local, is_open, product
from autograph_rewrite.ir.claims import Dim

FOLDS = {"Sum": "sum", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}
WIDTH = {19: 11, 14: 8, 1: 24, 2: 53, 8: 24, 18: 53}
"""Bits of the significand, by element type."""


def letters(count: int, prefix: str = "d") -> Names:
    """Return a name for each of some dimensions."""
    return tuple(f"{prefix}{i}" for i in range(count))


def closed(names: Names, *dims: int) -> Names:
    """Return names of which some are taken away."""
    shut = {dim % len(names) for dim in dims} if names else set()
    return tuple("" if i in shut else name for i, name in enumerate(names))


def _moved(seen: Seen, operands: Sequence[Names | None], results: Sequence[Names], data: int = 0) -> Factors:
    """Return the factors of an op that moves the elements of one operand."""
    return Factors(tuple(operands), tuple(results), added=frozenset((data,)), moves=True)


def _unknown(seen: Seen, data: int = 0) -> Factors | None:
    return unnamed(seen, added=(data,), moves=True)


# -- elementwise


def elementwise(seen: Seen) -> Factors | None:
    """Dimensions align from the right, and those of size one stretch."""
    return factors_of(seen, _all_alike(seen))


def addition(seen: Seen) -> Factors | None:
    """Contributions to terms are contributions to their sum."""
    return factors_of(seen, _all_alike(seen), added=tuple(range(len(seen.operands))))


def _all_alike(seen: Seen) -> str:
    return ",".join("@" for _ in seen.operands) + "->" + ",".join("@" for _ in seen.results)


def cast(seen: Seen) -> Factors | None:
    """Only widening is linear; a zero stays one."""
    source, target = seen.node.inputs[0].dtype % 100, seen.node.output_dtypes[0]
    widens = source in WIDTH and target in WIDTH and WIDTH[source] <= WIDTH[target] and (source in (8, 18)) <= (
        target in (8, 18)
    )  # fmt: skip
    return factors_of(seen, "@->@", linear=(0,) if widens else (), zeros=(0,))


def ensure_shape(seen: Seen) -> Factors | None:
    """A size that is stated is that of the whole, so that the dimension can't be cut."""
    stated, rank = seen.node.attr("shape"), seen.rank(0)
    if stated is None or rank is None or len(stated) != rank:
        return factors_of(seen, "@->@", added=(0,), moves=True)
    names = closed(letters(rank), *(i for i, size in enumerate(stated) if size is not None))
    return _moved(seen, (names,), (names,))


def select(seen: Seen) -> Factors | None:
    """Linear in both arms together; a vector condition of the old op chooses rows."""
    ranks = [seen.rank(i) for i in range(3)]
    if seen.node.op == "Select" and ranks[0] == 1 and (ranks[1] or 0) > 1:
        return factors_of(seen, "r,r@,r@->r@", added=(1, 2))
    return factors_of(seen, "@,@,@->@", added=(1, 2))


def zeros_like(seen: Seen) -> Factors | None:
    """Zeros are whole, blocks and contributions, as one likes."""
    found = factors_of(seen, "@->@", added=(0,), moves=True)
    return None if found is None else replace(found, is_zero=True)


# -- folds


def reduction(seen: Seen) -> Factors | None:
    """A fold over what is cut gives contributions; the others keep their order."""
    op, rank, axes = seen.node.op, seen.rank(0), _axes(seen)
    linear, keep = (0,) if op in ("Sum", "Mean") else (), seen.node.attr("keep_dims", False)
    if rank is None or axes is None or (axes[1] and not keep):
        return unnamed(seen, linear=linear)
    gone, perhaps = axes
    names = closed(letters(rank), *perhaps)
    made = closed(names, *gone) if keep else tuple(name for i, name in enumerate(names) if i not in gone)
    folded = frozenset(names[i] for i in gone) if op in FOLDS else frozenset()
    return Factors((names, None), (made,), folded, FOLDS.get(op, ""), linear=linear)


def _axes(seen: Seen) -> tuple[frozenset[int], frozenset[int]] | None:
    """Return the dimensions that are folded, and those of which only the run will tell."""
    rank, known, said = seen.rank(0), seen.ints(1), seen.operands[1].axes
    if known is not None:
        return frozenset(axis % rank for axis in known) if rank else frozenset(), frozenset()
    return None if said is None else (said[0], said[1] - said[0])


def extreme(seen: Seen) -> Factors | None:
    """The position of the largest along one dimension."""
    rank = seen.rank(0)
    axis = seen.axis(1, rank) if rank else None
    if rank is None or axis is None:
        return None
    names = letters(rank)
    return Factors((closed(names, axis), None), (names[:axis] + names[axis + 1 :],))


def running(seen: Seen) -> Factors | None:
    """A running sum, product or logarithm along one dimension; or elements that are turned round, or shifted."""
    linear = (0,) if seen.node.op == "Cumsum" else ()
    rank, axes = seen.rank(0), seen.ints(2 if seen.node.op == "Roll" else 1)
    if rank is None or axes is None:
        return unnamed(seen, linear=linear)
    names = closed(letters(rank), *axes)
    operands = (names, *(None,) * (len(seen.operands) - 1))
    if seen.node.op in ("Roll", "ReverseV2"):
        return _moved(seen, operands, (names,))
    return Factors(operands, (names,), linear=linear)


def rounded(seen: Seen) -> Factors | None:
    """Values rounded to steps of a range: of one that is given, by element; a slice along `axis` has one of its own."""
    rank, axis = seen.rank(0), seen.node.attr("axis", -1)
    if rank is None or not seen.node.attr("range_given", False):
        return None
    names = letters(rank) if axis == -1 else closed(letters(rank), axis)
    return Factors((names, *(None,) * (len(seen.operands) - 1)), (names,))


def reverse_sequence(seen: Seen) -> Factors | None:
    """Each example has a length of its own."""
    rank = seen.rank(0)
    if not rank:
        return None
    names = closed(letters(rank), seen.node.attr("seq_dim"))
    return _moved(seen, (names, (names[seen.node.attr("batch_dim", 0)],)), (names,))


# -- layout


def reshape(seen: Seen) -> Factors | str | None:
    """Blocks stay blocks where as many elements lie before the cut dimension on both sides.

    Of the target, no other entry may count a block, and that of the cut dimension must: every replica then has as many
    elements behind it as the whole has.
    """
    data, made = seen.operands[0], seen.results[0]
    if data.kind != "split":
        return _unknown(seen)
    target, shape, at = seen.value(1), data.shape, made.dim
    if made.kind != "split" or target is None or shape is None:
        return "a block is reshaped, and its shape or the target is not known"
    if at >= len(target) or data.dim >= len(shape):
        return f"result 0 is claimed split({at}), and has {len(target)} dimensions"
    local = [i for i, entry in enumerate(target) if is_local(entry)]
    before, behind = product(shape[: data.dim]), product(target[:at])
    if before is None or before != behind:
        return f"{before} elements lie before the blocks of input 0, and {behind} before those of result 0"
    if local not in ([], [at]) or not (target[at] == -1 or (local and _counts(target[at]) == _counts(shape[data.dim]))):
        return f"input 1 is {target}, which does not leave the blocks of {shape[data.dim]} whole"
    counts = product(shape), product(made.shape or (None,))
    if None not in counts and counts[0] != counts[1] and not any(map(is_open, counts)):  # the kernel compares them
        return f"result 0 is claimed to have the shape {made.shape}, of {shape}"
    names, entries = _only(len(shape), data.dim), _only(len(target), at)
    sizes = frozenset((1,)) if local else frozenset()
    return Factors((names, entries if local else None), (entries,), sizes=sizes, apart=True)


def _only(count: int, dim: int) -> Names:
    """Return names of dimensions of which one is cut."""
    return tuple("rows" if i == dim else "" for i in range(count))


def _counts(dim: Dim) -> tuple[str, ...]:
    """Return the blocks that a size counts."""
    return tuple(factor for factor in dim[1] if factor.startswith("b")) if isinstance(dim, tuple) else ()


def transpose(seen: Seen) -> Factors | None:
    """Dimensions change their places."""
    order = seen.ints(1)
    if order is None:
        return _unknown(seen)
    names = letters(len(order))
    return _moved(seen, (names, None), (tuple(names[i] for i in order),))


def expand_dims(seen: Seen) -> Factors | None:
    """One dimension more."""
    rank = seen.rank(0)
    axis = seen.axis(1, rank + 1) if rank is not None else None
    if rank is None or axis is None:
        return _unknown(seen)
    names = letters(rank)
    return _moved(seen, (names, None), ((*names[:axis], "", *names[axis:]),))


def squeeze(seen: Seen) -> Factors | None:
    """Dimensions of one row less; where they are not named, all must be known."""
    shape, named = seen.operands[0].shape, seen.node.attr("squeeze_dims") or ()
    if shape is None or (not named and not all(isinstance(dim, int) for dim in shape)):
        return _unknown(seen)
    gone = {dim % len(shape) for dim in named} if named else {i for i, dim in enumerate(shape) if dim == 1}
    names = closed(letters(len(shape)), *gone)
    return _moved(seen, (names,), (tuple(name for i, name in enumerate(names) if i not in gone),))


def broadcast_to(seen: Seen) -> Factors | None:
    """The target says which dimension is cut; the operand has it, or one row for all."""
    shape, target = seen.operands[0].shape, seen.value(1)
    if shape is None or target is None:
        return _unknown(seen)
    names = letters(len(target))
    mine = tuple("" if seen.stretches(0, at) else name for at, name in enumerate(names[len(names) - len(shape) :]))
    return Factors((mine, names), (names,), added=frozenset((0,)), moves=True, sizes=frozenset((1,)))


def tile(seen: Seen) -> Factors | None:
    """What is not repeated keeps its cut; one row that is repeated for each of a block makes a block."""
    shape, repeats = seen.operands[0].shape, seen.value(1)
    if shape is None or repeats is None:
        return _unknown(seen)
    names = letters(len(shape))
    kept = tuple(name if times == 1 else "" for name, times in zip(names, repeats, strict=True))
    counted = tuple(
        name if dim == 1 and is_local(times) else "" for name, dim, times in zip(names, shape, repeats, strict=True)
    )
    made = tuple(a or b for a, b in zip(kept, counted, strict=True))
    return Factors((kept, counted), (made,), added=frozenset((0,)), moves=True, sizes=frozenset((1,)))


def fill(seen: Seen) -> Factors | None:
    """One number in as many places as the shape says."""
    target = seen.value(0)
    names = None if target is None else letters(len(target))
    if names is None:
        return unnamed(seen, zeros=(1,))
    return Factors((names, None), (names,), sizes=frozenset((0,)), zeros=(1,))


# -- pieces


def pack(seen: Seen) -> Factors | None:
    """Pieces side by side along a new dimension."""
    count, rank = len(seen.operands), seen.rank(0)
    if rank is None:
        return unnamed(seen, added=tuple(range(count)), moves=_all_partial(seen, range(count)))
    names, axis = letters(rank), seen.node.attr("axis", 0) % (rank + 1)
    made = (*names[:axis], "", *names[axis:])
    return Factors(
        (names,) * count, (made,), added=frozenset(range(count)), moves=_all_partial(seen, range(count))
    )  # fmt: skip


def _all_partial(seen: Seen, pieces: Sequence[int]) -> bool:
    """Return whether no piece is whole: zeros are contributions to a sum only."""
    return all(seen.operands[i].kind == "partial" or (seen.operands[i].zero and _sums(seen)) for i in pieces)


def _sums(seen: Seen) -> bool:
    return all(claim.op == "sum" for claim in seen.operands if claim.kind == "partial")


def concat(seen: Seen) -> Factors | None:
    """Pieces one behind the other: blocks of one would lie between those of another."""
    count = len(seen.operands)
    at, pieces = (0, range(1, count)) if seen.node.op == "Concat" else (count - 1, range(count - 1))
    rank = seen.rank(pieces[0])
    axis = seen.axis(at, rank) if rank else None
    if rank is None or axis is None:
        return unnamed(seen, added=tuple(pieces), moves=_all_partial(seen, pieces))
    names = closed(letters(rank), axis)
    operands = tuple(None if i == at else names for i in range(count))
    return Factors(operands, (names,), added=frozenset(pieces), moves=_all_partial(seen, pieces))


def cut(seen: Seen) -> Factors | None:
    """Split and SplitV: parts along one dimension, which is not cut already."""
    data, at = (1, 0) if seen.node.op == "Split" else (0, 2)
    rank = seen.rank(data)
    axis = seen.axis(at, rank) if rank else None
    if rank is None or axis is None:
        return _unknown(seen, data)
    names = closed(letters(rank), axis)
    operands = tuple(names if i == data else None for i in range(len(seen.operands)))
    return _moved(seen, operands, (names,) * len(seen.results), data)


def unpack(seen: Seen) -> Factors | None:
    """Each row along one dimension."""
    rank = seen.rank(0)
    if not rank:
        return _unknown(seen)
    axis = seen.node.attr("axis", 0) % rank
    names = closed(letters(rank), axis)
    return _moved(seen, (names,), (names[:axis] + names[axis + 1 :],) * len(seen.results))


def pad(seen: Seen) -> Factors | None:
    """What is not padded keeps its cut; only zeros at the edges are linear."""
    pads, rank = seen.ints(1), seen.rank(0)
    linear = (0,) if seen.node.op == "Pad" else ()
    if pads is None or rank is None:
        return unnamed(seen, linear=linear)
    names = closed(letters(rank), *(i for i in range(rank) if pads[2 * i : 2 * i + 2] != (0, 0)))
    return Factors((names, *(None,) * (len(seen.operands) - 1)), (names,), linear=linear)
