"""Reduction axes of a broadcast's gradient: along which dimensions each operand was broadcast, known or not.

    [B, T, 8] and [B, U, 1]     first: perhaps 1      second: 2, perhaps 1

TensorFlow's kernel also names dimensions that are 1 on both sides. Summing those, or not, is the same of the whole, but
not of a block without rows; a constant names none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.certify.contracts.seen import Seen, line_up_whole, said, whole
from autograph_rewrite.ir.claims import Dim


def judge_axes(seen: Seen, *, folded: bool = False) -> str | None:
    """Return what is wrong with the axes that BroadcastGradientArgs is claimed to name.

    Args:
        seen: the node.
        folded: it is a constant after all.
    """
    for index, claim in enumerate((*seen.operands, *seen.results)):
        if claim.differs and (index >= 2 or claim.kind != "local"):
            return f"it reads and makes what is the same everywhere, and one is {said(claim)}"
    shapes = [[whole(dim, seen.batch) for dim in claim.value or ()] for claim in seen.operands]
    is_known = all(claim.value is not None for claim in seen.operands)
    rank = max(map(len, shapes))
    left, right = ([*[1] * (rank - len(shape)), *shape] for shape in shapes)
    for claim, mine, others in zip(seen.results, (left, right), (right, left), strict=True):
        axes = (frozenset(claim.value), frozenset(claim.value)) if claim.value is not None else claim.axes
        if axes is None:
            continue
        if not is_known:
            return f"it is claimed to name {sorted(map(str, axes[1]))}, and a shape is not known"
        names_ones = not folded and not (mine == others and None not in mine)
        if problem := _problem(axes[0], axes[1], mine, others) or (names_ones and _ones(axes[1], mine, others)):
            return problem
    return None


def _problem(sure: frozenset[Dim], possible: frozenset[Dim], mine: Sequence[Dim], others: Sequence[Dim]) -> str | None:
    for axis, (size, other) in enumerate(zip(mine, others, strict=True)):
        if axis in sure and size != 1:
            return f"it is claimed to name {axis}, where {size} is not known to be stretched to {other}"
        never = other == 1 or (isinstance(size, int) and size != 1) or line_up_whole(size, other)
        if axis not in possible and not never:
            return f"it is claimed not to name {axis}, where {size} may be stretched to {other}"
    return None


def _ones(possible: frozenset[Dim], mine: Sequence[Dim], others: Sequence[Dim]) -> str | None:
    for axis, pair in enumerate(zip(mine, others, strict=True)):
        if axis not in possible and all(not isinstance(size, int) or size == 1 for size in pair):
            return f"it is claimed not to name {axis}, where {pair[0]} and {pair[1]} may both be 1"
    return None
