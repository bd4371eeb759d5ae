"""Where values take turns (a merge of paths, the elements of a container), one placement has to fit all.

unknown, any   (not reached yet, an empty container) yield to whatever else there is
split          a replicated value is sliced to it; all split ones must agree on dimension and block size
partial        a replicated value counts on the first replica only; zeros count anywhere
otherwise      everything becomes whole
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.analysis.dims import Dim, is_settled, unit
from autograph_rewrite.analysis.fact import ANY, LOCAL, PARTIAL, REPLICATED, UNKNOWN, Fact, Placement, Shape
from autograph_rewrite.analysis.rules.base import Slice, Want


def reached(facts: Iterable[Fact]) -> list[Fact]:
    """Return the facts that say something."""
    return [fact for fact in facts if fact.placement not in (UNKNOWN, ANY)]


def join(facts: Iterable[Fact]) -> Fact:
    """Return one fact for values that take turns: their common placement, and the sizes they agree on."""
    every = list(facts)
    known = reached(every)
    if not known:
        empty = [fact for fact in every if fact.placement == ANY]
        return (empty or every)[0]._replace(cell="")
    placement, rows = _common(known)
    zero = all(fact.zero for fact in known)
    unset = any(fact.placement == ANY and fact.zero for fact in every)  # reserved elements: zeros
    value = known[0].value if not unset and all(fact.value == known[0].value for fact in known) else None
    shape = join_shapes([fact.shape for fact in known], placement, rows)
    return Fact(placement, known[0].dtype, shape, value, zero)


def _common(known: list[Fact]) -> tuple[Placement, Dim]:
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
    blocks = {size for size in blocks if is_settled(size)} or blocks  # stand-ins of an earlier round yield
    size = blocks.pop() if len(blocks) == 1 else None
    if placements == {target} or unit(size) is not None:
        return target, size
    return REPLICATED, None


def join_shapes(shapes: list[Shape | None], placement: Placement, rows: Dim) -> Shape | None:
    """Return the sizes that all agree on; the split dimension has the size of its blocks."""
    known = [shape for shape in shapes if shape is not None]
    unknown = len(known) < len(shapes)
    # What is sliced to the blocks of another has its rank, even if that is all one knows.
    if not known or (unknown and not placement.is_split) or len({len(shape) for shape in known}) > 1:
        return None
    agreed = [dims[0] if len(set(dims)) == 1 and not unknown else None for dims in zip(*known, strict=True)]
    if placement.is_split and placement.dim < len(agreed):
        agreed[placement.dim] = rows
    return tuple(agreed)


def conform(fact: Fact, target: Fact) -> Want | None:
    """Return what turns one value into the joined placement; None where it is that already."""
    have, want = fact.placement, target.placement
    if have == want and (not want.is_split or not is_settled(fact.split_size) or target.split_size is None):
        return None
    if have == want and fact.split_size == target.split_size:
        return None
    if want.is_split:
        rows = unit(target.split_size)
        return REPLICATED if rows is None else Slice(want.dim, rows)
    if want == PARTIAL:
        return None if fact.zero and not have.differs else PARTIAL
    return REPLICATED if have.differs else None
