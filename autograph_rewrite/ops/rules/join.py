"""Joins placements: finds one that fits all values that a Merge or a container may hold.

unknown, any   (not reached yet, an empty container) yield to any other placement
split          a replicated value is sliced to it, if it is known to have the rows of all blocks: values that take turns
               need not be equally long; all split values must agree on the dimension
partial        a replicated value counts on the first replica only; zeros count anywhere
otherwise      everything becomes whole
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.ops.facts.placement import ANY, LOCAL, PARTIAL, REPLICATED, UNKNOWN, Fact, Placement, Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim, is_whole_of, to_global, unit
from autograph_rewrite.ops.rules.base import Reshard, Slice


def reached(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts of values that propagation has reached."""
    return [fact for fact in facts if fact.placement not in (UNKNOWN, ANY)]


def join(facts: Iterable[Fact], batch: int | None) -> Fact:
    """Return one fact for values that take turns: their common placement, and the sizes that all have."""
    every = list(facts)
    known = reached(every)
    if not known:
        empty = [fact for fact in every if fact.placement == ANY]
        return (empty or every)[0]._replace(cell="")
    placement, rows = _common(known, batch)
    zero = all(fact.zero for fact in known)
    unset = any(fact.placement == ANY and fact.zero for fact in every)  # reserved elements: zeros
    value = known[0].value if not unset and all(fact.value == known[0].value for fact in known) else None
    shape = join_shapes([_shape_in(fact, placement, batch) for fact in known], placement, rows)
    return Fact(placement, known[0].dtype, shape, value, zero)


def _common(known: list[Fact], batch: int | None) -> tuple[Placement, Dim]:
    """Return the placement that fits all, and the size of its blocks."""
    placements = {fact.placement for fact in known}
    if placements == {LOCAL}:
        values = {fact.value for fact in known}
        return (LOCAL if len(values) == 1 and None not in values else REPLICATED), None
    target = next((p for p in placements if p != REPLICATED), REPLICATED)
    if placements - {REPLICATED, target} or target == LOCAL:
        return REPLICATED, None
    if not target.is_split:
        mixed = placements != {target}
        return (REPLICATED if mixed and target != PARTIAL else target), None
    blocks = {fact.split_size for fact in known if fact.placement == target}
    size = blocks.pop() if len(blocks) == 1 else None
    fits = all(fact.placement == target or _has_blocks(fact, target, size, batch) for fact in known)
    return (target, size) if fits else (REPLICATED, None)


def _has_blocks(fact: Fact, target: Placement, size: Dim, batch: int | None) -> bool:
    """Return whether a replicated value is known to have a block of that size for each replica."""
    rows = (fact.shape or ())[target.dim : target.dim + 1]
    return unit(size) is not None and any(is_whole_of(dim, size, batch) for dim in rows)


def _shape_in(fact: Fact, placement: Placement, batch: int | None) -> Shape | None:
    """Return the shape of a value once it is converted to the joined placement."""
    if fact.shape is None or placement.is_split:
        return fact.shape
    return tuple(to_global(dim, batch) for dim in fact.shape)


def join_shapes(shapes: list[Shape | None], placement: Placement, rows: Dim) -> Shape | None:
    """Return the sizes that all agree on; the split dimension has the size of its blocks.

    Args:
        rows: size of a block along the split dimension.
    """
    known = [shape for shape in shapes if shape is not None]
    unknown = len(known) < len(shapes)
    # A value that is sliced to the blocks of another has the same rank, even if its sizes are unknown.
    if not known or (unknown and not placement.is_split) or len({len(shape) for shape in known}) > 1:
        return None
    agreed = [dims[0] if len(set(dims)) == 1 and not unknown else None for dims in zip(*known, strict=True)]
    if placement.is_split and placement.dim < len(agreed):
        agreed[placement.dim] = rows
    return tuple(agreed)


MISFIT = UNKNOWN
"""The result of `conform` for a value that has no blocks like those of the others."""


def conform(fact: Fact, target: Fact, batch: int | None) -> Reshard | None:
    """Return the conversion of one value to the joined placement, or MISFIT; None where the value already has it.

    Args:
        target: the joined fact; with a cell it is known to be as large as the value.
    """
    have, reshard = fact.placement, target.placement
    if have == reshard:
        return None
    if reshard.is_split:
        whole = fact._replace(shape=tuple(to_global(dim, batch) for dim in fact.shape or ()))
        fits = bool(target.cell) or _has_blocks(whole, reshard, target.split_size, batch)
        rows = unit(target.split_size) if fits else None
        return MISFIT if rows is None else Slice(reshard.dim, rows)
    if reshard == PARTIAL:
        return None if fact.zero and not have.differs else PARTIAL
    return REPLICATED if have.differs else None
